"""What compares a method with the truth; audits see everything, so they are no part of a method."""
