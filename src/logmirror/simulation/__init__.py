"""The product's own code in a world that is made up: drawn faults, virtual time, one seed."""
