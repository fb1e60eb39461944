"""Communication: process groups and collectives, redistribution, and what ranks must agree on."""
