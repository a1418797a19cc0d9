package allreduce

import (
	"sync"

	"gpu.example/allreduce/device"
	"gpu.example/allreduce/internal/core"
	"gpu.example/allreduce/internal/nvml"
)

// lookOnce asks NVML once per process: what cards and slots can do does not change.
var lookOnce = sync.OnceValues(func() (*nvml.Info, error) { return nvml.Query(nvml.Options{}) })

// linkRates gives the rate of each rank's link to the host, one direction while both run, in GB/s; 0 where it is not
// known. The copy engines choose their chunk by it. Nothing is measured: the rate is what card and slot can do at most,
// since an idle link reports its lowest generation. The warning says why rates are not known.
func linkRates(backend Backend, devices []int32) (rates []float64, warning string) {
	rates = make([]float64, len(devices))
	if backend == BackendEmulated {
		machine := device.CurrentMachine()
		for i, d := range devices {
			if int(d) < len(machine.Devices) {
				m := machine.Devices[d]
				rates[i] = min(m.H2DGBs, m.D2HGBs, m.DuplexGBs)
			}
		}
		return rates, ""
	}
	info, err := lookOnce()
	if err != nil {
		return rates, err.Error() + ": the copy engines' chunk is that of a PCIe 4 x16 link"
	}
	for i, d := range devices {
		about, e := core.GetDeviceInfo(int32(backend), int(d))
		if e != nil {
			continue
		}
		if found := info.ByBusID(about.BusID); found != nil {
			rates[i] = nvml.LinkGBs(found.MaxLink())
		}
	}
	return rates, ""
}
