package main

// emulatedHazards is how many hazards the emulated machine has found since it was configured.
func emulatedHazards() int64 { return 0 }
