"""The matrices and laws behind the closed forms."""
