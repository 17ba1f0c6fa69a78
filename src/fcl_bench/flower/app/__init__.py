"""Methods of fcl-bench as a Flower app: a `ServerApp` and a `ClientApp` around a user's own network and loader."""
