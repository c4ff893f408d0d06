"""How a task looks on the wire, one module for each protocol era. Pure; neither knows the other."""
