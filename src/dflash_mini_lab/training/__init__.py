"""The drafter's preparation, from nothing but the target: teacher data → features → drafter → artifacts."""
