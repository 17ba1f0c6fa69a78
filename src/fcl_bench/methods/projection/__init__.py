"""Methods that project updates out of the subspaces of earlier tasks."""
