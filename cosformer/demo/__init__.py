"""`cosformer demo`: the library at work on what every machine has, within minutes on a CPU."""
