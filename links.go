package allreduce

import (
	"gpu.example/allreduce/device"
)

// linkRates gives the rate of each rank's link to the host, one direction, in GB/s; 0 where it is not known. The copy
// engines choose their chunk by it. Links are not measured: an idle one reports its lowest generation.
func linkRates(backend Backend, devices []int32) []float64 {
	rates := make([]float64, len(devices))
	if backend == BackendEmulated {
		machine := device.CurrentMachine()
		for i, d := range devices {
			if int(d) < len(machine.Devices) {
				rates[i] = min(machine.Devices[d].H2DGBs, machine.Devices[d].D2HGBs)
			}
		}
	}
	return rates
}
