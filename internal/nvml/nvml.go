// Package nvml asks NVIDIA's management library what the GPUs and their links can do. It is the only importer of
// go-nvml, whose linker flags reach the whole binary (it makes the linker ignore missing symbols), and it answers
// ErrNotAvailable where there is no library, no cgo or no Linux. Nothing here is needed for a reduction.
//
// NVML counts devices in its own order and ignores CUDA_VISIBLE_DEVICES: match by bus id, never by index.
package nvml

import (
	"errors"
	"fmt"
	"strconv"
	"strings"
)

// ErrNotAvailable: there is no NVML here (no library, no driver, built without cgo, not Linux). The text says which.
var ErrNotAvailable = errors.New("NVML is not available")

// Options are for Query; the zero value is the machine itself.
type Options struct {
	SysfsRoot string // where sysfs is mounted; "": /sys
}

// Info is what one look found.
type Info struct {
	Driver   string // driver version, "" if unknown
	Devices  []Device
	P2P      [][]P2P  // [from][to], by position in Devices; a device with itself is all zero
	Warnings []string // what could not be asked; its fields are zero
}

// Device is one GPU. Generations are 1 to 7 and widths lanes; 0 is unknown. All are what the hardware can do, not what
// the link does now: an idle link reports Gen1.
type Device struct {
	Index              int    // NVML's, not CUDA's
	UUID               string // "GPU-..."
	BusID              string // as sysfs writes it: "0000:17:00.0"
	Name               string
	CardGen, CardWidth int // the card alone
	LinkGen, LinkWidth int // card and system together, as NVML sees them
	SlotGen, SlotWidth int // the narrowest hop between the card and the root, from sysfs
}

// MaxLink is the generation and width the link can reach at best: the least of all that is known, 0 where nothing is.
func (d *Device) MaxLink() (gen, width int) {
	return leastKnown(d.CardGen, d.LinkGen, d.SlotGen), leastKnown(d.CardWidth, d.LinkWidth, d.SlotWidth)
}

func leastKnown(values ...int) int {
	least := 0
	for _, v := range values {
		if v > 0 && (least == 0 || v < least) {
			least = v
		}
	}
	return least
}

// ByBusID finds the device with a bus id in any spelling, nil where there is none.
func (i *Info) ByBusID(id string) *Device {
	want := NormalBusID(id)
	for n := range i.Devices {
		if i.Devices[n].BusID == want {
			return &i.Devices[n]
		}
	}
	return nil
}

// P2P is what the driver says about one GPU reaching another's memory. It is a claim, not a proof.
type P2P struct {
	Read, Write, Atomics, NVLink Status
}

// Status is NVML's answer to one such question.
type Status int8

// The answers, NVML's numbers plus one.
const (
	Unasked              Status = iota // NVML was not asked, or gave an error
	OK                                 //
	ChipsetNotSupported                //
	GPUNotSupported                    //
	TopologyNotSupported               //
	DisabledByRegistry                 //
	NotSupported                       //
	Unknown                            //
)

var statusNames = [...]string{"-", "OK", "CNS", "GNS", "TNS", "DR", "NS", "U"}

// String gives nvidia-smi's abbreviations: OK, CNS, GNS, TNS, DR, NS, U; "-" where NVML was not asked.
func (s Status) String() string {
	if s >= 0 && int(s) < len(statusNames) {
		return statusNames[s]
	}
	return "U"
}

// NormalBusID writes a bus id as sysfs does, from any of the spellings in use: NVML's has an 8-digit upper-case domain,
// CUDA's 4 digits of either case. What is no bus id comes back in lower case.
func NormalBusID(id string) string {
	parts := strings.Split(id, ":")
	if len(parts) == 2 {
		parts = append([]string{"0"}, parts...)
	}
	if len(parts) == 3 {
		slot, function, dotted := strings.Cut(parts[2], ".")
		numbers := [4]uint64{}
		var err error
		for i, text := range []string{parts[0], parts[1], slot, function} {
			if numbers[i], err = strconv.ParseUint(text, 16, 32); err != nil {
				break
			}
		}
		if dotted && err == nil {
			return fmt.Sprintf("%04x:%02x:%02x.%x", numbers[0], numbers[1], numbers[2], numbers[3])
		}
	}
	return strings.ToLower(id)
}

// What one lane carries one way in practice, GB/s: measured on Gen3 (13.2 of x16), Gen4 (26.3) and Gen5 (55.3); Gen1,
// Gen2 and Gen6 are scaled by their signalling and encoding.
var laneGBs = [...]float64{1: 0.208, 2: 0.416, 3: 0.82, 4: 1.65, 5: 3.45, 6: 6.9}

// withAllFlows is what is left of it while both directions of every GPU's link run, as they do in a reduction: 0.85
// gives 46.9 GB/s for Gen5 x16, where 46 were measured (two H200, 16 MiB ring).
const withAllFlows = 0.85

// LinkGBs is the rate to expect of a link per direction during a reduction, in GB/s (10^9 bytes); it is what chunk
// sizes are computed from. 0 where generation or width is unknown; beyond Gen6 it is Gen6's.
func LinkGBs(gen, width int) float64 {
	if gen <= 0 || width <= 0 {
		return 0
	}
	return laneGBs[min(gen, len(laneGBs)-1)] * float64(width) * withAllFlows
}
