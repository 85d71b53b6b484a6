"""One connection of a client: frames in, requests dispatched in order, responses in that order."""
