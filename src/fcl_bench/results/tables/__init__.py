"""Tables: their cells, and the formats in which they are written."""
