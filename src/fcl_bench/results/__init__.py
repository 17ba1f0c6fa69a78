"""From run folders to tables, figures and a page."""
