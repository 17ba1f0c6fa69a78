"""Methods that make synthetic samples or features of earlier tasks."""
