"""How numbers come to be trusted: schedule, clocks, statistics, the verifier's cost curve, facts about the machine."""
