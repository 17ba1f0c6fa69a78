"""Clients on other machines, over Flower: a SuperLink here, a SuperNode and a resident worker at each site."""
