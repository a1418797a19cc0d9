package main

import (
	"github.com/spf13/pflag"

	"gpu.example/allreduce/device"
)

// emulatedDevices are those of the machine that --emulate makes.
const emulatedDevices = 8

func addEmulate(flags *pflag.FlagSet, value *string) {
	flags.Var(newChoice(value, "", "peer"), "emulate", "what the emulated machine has: `peer` (the driver grants peer access)")
}

// emulateMachine makes the machine that --emulate describes; "" leaves the default, or the environment's.
func emulateMachine(what string) error {
	if what == "" {
		return nil
	}
	m := device.DefaultMachine(emulatedDevices)
	for a := range m.Devices {
		row := make([]bool, len(m.Devices))
		for b := range row {
			row[b] = a != b
		}
		m.Peer = append(m.Peer, row)
	}
	return device.ConfigureOnce(m)
}
