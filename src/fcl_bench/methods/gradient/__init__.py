"""Methods that train the network, round by round."""
