"""Audits compare a method with the truth; they see all data, so they are not part of a method."""
