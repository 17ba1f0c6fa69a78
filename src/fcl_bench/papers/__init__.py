"""The papers: the numbers they print, the settings of each, and the conventions under which they count."""
