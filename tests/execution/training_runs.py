"""Small runs that train a network, for tests."""

#: With the fixture `images`, a run of a second.
TINY = (
    "backbone=tiny",
    "backbone.width=4",
    "tasks=3",
    "clients=3",
    "partition.min_size=0",
    "method.training.rounds=3",
    "method.training.epochs=1",
    "method.training.batch_size=16",
)
