"""Clients on other machines, over Flower: a SuperLink here, a SuperNode and a worker at each site."""
