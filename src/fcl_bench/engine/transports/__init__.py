"""How the processes of a run reach each other: the choices of the group `transport`."""
