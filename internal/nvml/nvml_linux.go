//go:build cgo && linux

package nvml

import (
	"fmt"
	"sync"

	"github.com/NVIDIA/go-nvml/pkg/nvml"
)

// one look at a time: go-nvml keeps its table of versioned symbols in package variables.
var one sync.Mutex

// Query looks once: it loads the library, asks and unloads it again.
func Query(opts Options) (*Info, error) { return query(nvml.New(), opts) }

// query asks a library, real or mocked. Nothing but Init may be called before Init has succeeded: without the library
// every other symbol is unresolved, and calling one ends the process. For the same reason the calls that came after the
// first NVML are looked up before they are used: an older driver's library lacks them.
func query(lib nvml.Interface, opts Options) (*Info, error) {
	one.Lock()
	defer one.Unlock()
	if ret := lib.Init(); ret != nvml.SUCCESS {
		return nil, fmt.Errorf("%w: %s", ErrNotAvailable, ret.Error())
	}
	defer lib.Shutdown()

	l := look{lib: lib, info: &Info{}}
	count, ret := lib.DeviceGetCount()
	if ret != nvml.SUCCESS {
		return nil, fmt.Errorf("%w: counting devices: %s", ErrNotAvailable, ret.Error())
	}
	l.info.Driver = asked(&l, "driver version", "", lib.SystemGetDriverVersion)
	var handles []nvml.Device
	for index := range count {
		handle, ret := lib.DeviceGetHandleByIndex(index)
		if ret != nvml.SUCCESS { // a card that fell off the bus must not hide the others
			l.warn("device", index, ret)
			continue
		}
		handles = append(handles, handle)
		l.info.Devices = append(l.info.Devices, l.device(index, handle, opts))
	}
	l.peers(handles)
	return l.info, nil
}

// look is one query in progress.
type look struct {
	lib  nvml.Interface
	info *Info
}

func (l *look) warn(what string, index int, ret nvml.Return) {
	l.info.Warnings = append(l.info.Warnings, fmt.Sprintf("NVML device %d: %s: %s", index, what, ret.Error()))
}

// asked gives the answer, or the zero value and a warning. A call that the installed library lacks is not made. What
// a GPU does not support (a link on a part without PCIe) is unknown and no warning.
func asked[T any](l *look, what, symbol string, call func() (T, nvml.Return)) (answer T) {
	if symbol != "" && l.lib.Extensions().LookupSymbol(symbol) != nil {
		return answer
	}
	got, ret := call()
	switch ret {
	case nvml.SUCCESS:
		return got
	case nvml.ERROR_NOT_SUPPORTED, nvml.ERROR_FUNCTION_NOT_FOUND:
	default:
		l.info.Warnings = append(l.info.Warnings, fmt.Sprintf("NVML: %s: %s", what, ret.Error()))
	}
	return answer
}

func (l *look) device(index int, handle nvml.Device, opts Options) Device {
	name := func(what string) string { return fmt.Sprintf("device %d: %s", index, what) }
	d := Device{
		Index:     index,
		UUID:      asked(l, name("UUID"), "", handle.GetUUID),
		Name:      asked(l, name("name"), "", handle.GetName),
		CardGen:   asked(l, name("card's link generation"), "nvmlDeviceGetGpuMaxPcieLinkGeneration", handle.GetGpuMaxPcieLinkGeneration),
		LinkGen:   asked(l, name("link generation"), "nvmlDeviceGetMaxPcieLinkGeneration", handle.GetMaxPcieLinkGeneration),
		LinkWidth: asked(l, name("link width"), "nvmlDeviceGetMaxPcieLinkWidth", handle.GetMaxPcieLinkWidth),
	}
	pci := asked(l, name("bus id"), "", handle.GetPciInfo)
	if id := text(pci.BusId[:]); id != "" {
		d.BusID = NormalBusID(id)
		card, slot := sysfsLinks(opts.SysfsRoot, d.BusID)
		d.CardGen, d.CardWidth = leastKnown(d.CardGen, card.gen), card.width
		d.SlotGen, d.SlotWidth = slot.gen, slot.width
	}
	return d
}

// peers asks for every ordered pair. NVML's answers are passed on as they are: they say what the driver would try.
func (l *look) peers(handles []nvml.Device) {
	const symbol = "nvmlDeviceGetP2PStatus"
	l.info.P2P = make([][]P2P, len(handles))
	for from := range handles {
		l.info.P2P[from] = make([]P2P, len(handles))
		for to := range handles {
			if from == to {
				continue
			}
			ask := func(index nvml.GpuP2PCapsIndex) Status {
				what := fmt.Sprintf("devices %d to %d: P2P status", l.info.Devices[from].Index, l.info.Devices[to].Index)
				status := asked(l, what, symbol, func() (*nvml.GpuP2PStatus, nvml.Return) {
					status, ret := handles[from].GetP2PStatus(handles[to], index)
					return &status, ret
				})
				switch {
				case status == nil:
					return Unasked
				case *status > nvml.P2P_STATUS_UNKNOWN:
					return Unknown
				}
				return Status(*status) + OK
			}
			l.info.P2P[from][to] = P2P{
				Read: ask(nvml.P2P_CAPS_INDEX_READ), Write: ask(nvml.P2P_CAPS_INDEX_WRITE),
				Atomics: ask(nvml.P2P_CAPS_INDEX_ATOMICS), NVLink: ask(nvml.P2P_CAPS_INDEX_NVLINK),
			}
		}
	}
}

// text reads a C string from a fixed field.
func text[C ~int8 | ~uint8](field []C) string {
	var b []byte
	for _, c := range field {
		if c == 0 {
			break
		}
		b = append(b, byte(c))
	}
	return string(b)
}
