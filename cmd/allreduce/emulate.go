package main

import (
	"os"

	"github.com/spf13/pflag"

	"gpu.example/allreduce/device"
)

// emulatedDevices are those of the machine that --emulate makes.
const emulatedDevices = 8

func addEmulate(flags *pflag.FlagSet, value *string) {
	flags.Var(newChoice(value, "", "peer"), "emulate", "what the emulated machine has: `peer` (the driver grants peer access)")
}

// emulateMachine makes the machine that --emulate describes; "" leaves the environment's. Stepped, it does not depend on how
// fast this process gets its turns: the same command gives the same simulated times. Several processes cannot be stepped.
func emulateMachine(what string, drive device.Drive) error {
	if what == "" && (drive == device.Background || os.Getenv("GGML_CUDA_AR_EMULATED") != "") {
		return nil
	}
	m := device.DefaultMachine(emulatedDevices)
	m.Drive = drive
	if what == "" {
		return device.ConfigureOnce(m)
	}
	for a := range m.Devices {
		row := make([]bool, len(m.Devices))
		for b := range row {
			row[b] = a != b
		}
		m.Peer = append(m.Peer, row)
	}
	return device.ConfigureOnce(m)
}
