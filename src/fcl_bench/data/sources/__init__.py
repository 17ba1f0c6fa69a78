"""Where data come from: hubs, folders, feature files."""
