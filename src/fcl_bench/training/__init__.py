"""Local training of a network: heads, objective, trainer, layer inputs."""
