"""Will it help, and with which settings? Costs of this machine and acceptance of a pair, made into expected speed-ups."""
