"""PURE. The controller and the values it speaks in. Reads no clock, file, socket, environment or random source."""
