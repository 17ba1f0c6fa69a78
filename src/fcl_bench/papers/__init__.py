"""The papers: the numbers they print, the setting of each number, and the conventions by which they count bytes."""
