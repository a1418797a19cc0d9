package device

import (
	"fmt"
	"slices"
	"sync"

	"gpu.example/allreduce/internal/core"
)

// Limits of an emulated machine.
const (
	MaxMachineDevices = core.MaxEmulatedDevices // devices, and uplinks
	defaultDevices    = 8                       // what the core makes where nothing was configured
	maxRateGBs        = 1e6
	maxMicros         = 1e9
	maxCount          = 1 << 20
	maxMemoryBytes    = 1 << 40
)

// Drive says what makes emulated devices work.
type Drive int32

// The drives.
const (
	Background Drive = 0 // a worker thread runs the devices; deadlines use real time (the default)
	Stepped    Drive = 1 // work advances only inside calls that wait or query; the same seed gives the same run
)

var driveNames = []string{"background", "stepped"}

// String gives "background" or "stepped".
func (d Drive) String() string { return nameOf(driveNames, int32(d)) }

// MarshalText writes the name.
func (d Drive) MarshalText() ([]byte, error) { return []byte(d.String()), nil }

// UnmarshalText reads a name as String gives it.
func (d *Drive) UnmarshalText(text []byte) error {
	return parseName("drive", driveNames, text, (*int32)(d))
}

// Schedule says in which order the machine runs what could run.
type Schedule int32

// The schedules.
const (
	FIFO        Schedule = 0 // earliest simulated time first: times mean something
	Random      Schedule = 1 // any ready operation, by seed
	Adversarial Schedule = 2 // the latest possible: newest first, copies last, one device starved by seed
	Priorities  Schedule = 3 // PCT: random priorities of streams and blocks that drop now and then, by seed
)

var scheduleNames = []string{"fifo", "random", "adversarial", "priorities"}

// String gives "fifo", "random", "adversarial" or "priorities".
func (s Schedule) String() string { return nameOf(scheduleNames, int32(s)) }

// MarshalText writes the name.
func (s Schedule) MarshalText() ([]byte, error) { return []byte(s.String()), nil }

// UnmarshalText reads a name as String gives it.
func (s *Schedule) UnmarshalText(text []byte) error {
	return parseName("schedule", scheduleNames, text, (*int32)(s))
}

// Machine describes the emulated machine, in Go or as the JSON file that GGML_CUDA_AR_EMULATED names (LoadMachine). A
// field at its zero value takes the default, which is the reference machine's: PCIe 5 x16 links, no peer access. Rates
// are GB/s (10^9 bytes per second), times simulated microseconds.
type Machine struct {
	Devices      []MachineDevice `json:"devices"`              // 1 to MaxMachineDevices; ordinals count from 0
	UplinkGBs    []float64       `json:"uplink_gbs,omitempty"` // shared uplinks, each direction; see MachineDevice.Uplink
	HostGBs      float64         `json:"host_gbs,omitempty"`   // all flows through host memory together; default 184
	PeerGBs      float64         `json:"peer_gbs,omitempty"`   // peer copies and stores; default 376
	Peer         [][]bool        `json:"peer,omitempty"`       // Peer[a][b]: the driver grants a access to b; default none
	CopyMicros   float64         `json:"copy_us,omitempty"`    // fixed cost of a copy; default 3
	LaunchMicros float64         `json:"launch_us,omitempty"`  // launch of a kernel; default 2
	HopMicros    float64         `json:"hop_us,omitempty"`     // an event of one device seen by another; default 2.8
	FlagMicros   float64         `json:"flag_us,omitempty"`    // a flag through pinned memory, one way; default 1.6
	Drive        Drive           `json:"drive,omitempty"`      // "background" or "stepped"
	Schedule     Schedule        `json:"schedule,omitempty"`   // "fifo", "random", "adversarial" or "priorities"
	Seed         uint64          `json:"seed,omitempty"`       // of the schedule; default 1
}

// MachineDevice describes one emulated device; zero fields take the defaults named here.
type MachineDevice struct {
	H2DGBs         float64 `json:"h2d_gbs,omitempty"`         // host to device, alone; default 55
	D2HGBs         float64 `json:"d2h_gbs,omitempty"`         // device to host, alone; default 55
	DuplexGBs      float64 `json:"duplex_gbs,omitempty"`      // each direction while both are busy; default 48
	MemoryGBs      float64 `json:"memory_gbs,omitempty"`      // device memory; default 4000
	KernelHostGBs  float64 `json:"kernel_host_gbs,omitempty"` // a kernel's own access to host memory; default 28
	SMs            int     `json:"sms,omitempty"`             // default 132
	ResidentBlocks int     `json:"resident_blocks,omitempty"` // blocks resident at once; default 264
	CCMajor        int     `json:"cc_major,omitempty"`        // compute capability; default 9.0
	CCMinor        int     `json:"cc_minor,omitempty"`
	Uplink         int     `json:"uplink,omitempty"`       // the shared uplink it hangs on, counted from 1; 0: none
	MemoryBytes    int64   `json:"memory_bytes,omitempty"` // default 8 GiB; allocations beyond it fail
}

// DefaultMachine gives a machine of n devices (1 to MaxMachineDevices, else the nearest) with every default filled in.
func DefaultMachine(n int) Machine {
	c := core.EmulatedDefaults(n)
	m := Machine{
		HostGBs: c.HostGBs, PeerGBs: c.PeerGBs,
		CopyMicros: c.CopyUs, LaunchMicros: c.LaunchUs, HopMicros: c.HopUs, FlagMicros: c.FlagUs,
		Drive: Drive(c.Drive), Schedule: Schedule(c.Schedule), Seed: c.Seed,
	}
	for _, d := range c.Devices {
		m.Devices = append(m.Devices, MachineDevice{
			H2DGBs: d.H2DGBs, D2HGBs: d.D2HGBs, DuplexGBs: d.DuplexGBs, MemoryGBs: d.MemoryGBs, KernelHostGBs: d.KernelHostGBs,
			SMs: int(d.SMs), ResidentBlocks: int(d.ResidentBlocks), CCMajor: int(d.CCMajor), CCMinor: int(d.CCMinor),
			Uplink: int(d.Uplink) + 1, MemoryBytes: d.MemoryBytes,
		})
	}
	return m
}

// filled gives the machine with its zero fields at their defaults.
func (m Machine) filled() Machine {
	def := DefaultMachine(len(m.Devices))
	m.Devices = slices.Clone(m.Devices)
	for i := range m.Devices {
		d, from := &m.Devices[i], def.Devices[i]
		orFloat(&d.H2DGBs, from.H2DGBs)
		orFloat(&d.D2HGBs, from.D2HGBs)
		orFloat(&d.DuplexGBs, min(from.DuplexGBs, d.H2DGBs, d.D2HGBs))
		orFloat(&d.MemoryGBs, from.MemoryGBs)
		orFloat(&d.KernelHostGBs, from.KernelHostGBs)
		orInt(&d.SMs, from.SMs)
		orInt(&d.ResidentBlocks, from.ResidentBlocks)
		if d.CCMajor == 0 {
			d.CCMajor, d.CCMinor = from.CCMajor, from.CCMinor
		}
		orInt(&d.MemoryBytes, from.MemoryBytes)
	}
	orFloat(&m.HostGBs, def.HostGBs)
	orFloat(&m.PeerGBs, def.PeerGBs)
	orFloat(&m.CopyMicros, def.CopyMicros)
	orFloat(&m.LaunchMicros, def.LaunchMicros)
	orFloat(&m.HopMicros, def.HopMicros)
	orFloat(&m.FlagMicros, def.FlagMicros)
	if m.Seed == 0 {
		m.Seed = def.Seed
	}
	return m
}

func orFloat(to *float64, def float64) {
	if *to == 0 {
		*to = def
	}
}

func orInt[T int | int64](to *T, def T) {
	if *to == 0 {
		*to = def
	}
}

// Validate says what in a machine is out of range: an ErrArgument that names the field as the file does.
func (m Machine) Validate() error {
	var err error
	refuse := func(field string, value any, allowed string) {
		if err == nil {
			err = machineError("%s is %v; allowed: %s", field, value, allowed)
		}
	}
	inRange := func(field string, value, low, high float64) {
		if !(value >= low && value <= high) { // refuses NaN as well
			refuse(field, value, fmt.Sprintf("0 (default) or %g to %g", low, high))
		}
	}
	rate := func(field string, value float64) {
		if value != 0 {
			inRange(field, value, 0.001, maxRateGBs)
		}
	}
	count := func(field string, value int) {
		if value != 0 {
			inRange(field, float64(value), 1, maxCount)
		}
	}
	if n := len(m.Devices); n < 1 || n > MaxMachineDevices {
		refuse("devices", fmt.Sprintf("a list of %d", n), fmt.Sprintf("1 to %d devices", MaxMachineDevices))
	}
	if n := len(m.UplinkGBs); n > MaxMachineDevices {
		refuse("uplink_gbs", fmt.Sprintf("a list of %d", n), fmt.Sprintf("up to %d uplinks", MaxMachineDevices))
	}
	for i, d := range m.Devices {
		at := fmt.Sprintf("devices[%d].", i)
		rate(at+"h2d_gbs", d.H2DGBs)
		rate(at+"d2h_gbs", d.D2HGBs)
		rate(at+"duplex_gbs", d.DuplexGBs)
		rate(at+"memory_gbs", d.MemoryGBs)
		rate(at+"kernel_host_gbs", d.KernelHostGBs)
		count(at+"sms", d.SMs)
		count(at+"resident_blocks", d.ResidentBlocks)
		if d.CCMajor < 0 || d.CCMajor > 99 {
			refuse(at+"cc_major", d.CCMajor, "0 (default) or 1 to 99")
		}
		if d.CCMinor < 0 || d.CCMinor > 99 {
			refuse(at+"cc_minor", d.CCMinor, "0 to 99")
		}
		if d.Uplink < 0 || d.Uplink > len(m.UplinkGBs) {
			refuse(at+"uplink", d.Uplink, fmt.Sprintf("0 (none) or 1 to %d, the length of uplink_gbs", len(m.UplinkGBs)))
		}
		if d.MemoryBytes < 0 || d.MemoryBytes > maxMemoryBytes {
			refuse(at+"memory_bytes", d.MemoryBytes, fmt.Sprintf("0 (default) or 1 to %d", int64(maxMemoryBytes)))
		}
	}
	for i, u := range m.UplinkGBs {
		inRange(fmt.Sprintf("uplink_gbs[%d]", i), u, 0.001, maxRateGBs)
	}
	rate("host_gbs", m.HostGBs)
	rate("peer_gbs", m.PeerGBs)
	for _, t := range []struct {
		field string
		value float64
	}{{"copy_us", m.CopyMicros}, {"launch_us", m.LaunchMicros}, {"hop_us", m.HopMicros}, {"flag_us", m.FlagMicros}} {
		inRange(t.field, t.value, 0, maxMicros)
	}
	if len(m.Peer) != 0 && len(m.Peer) != len(m.Devices) {
		refuse("peer", fmt.Sprintf("a list of %d rows", len(m.Peer)), "none, or one row per device")
	}
	for i, row := range m.Peer {
		if len(row) != len(m.Devices) {
			refuse(fmt.Sprintf("peer[%d]", i), fmt.Sprintf("a list of %d", len(row)), "one entry per device")
		}
	}
	if int(m.Drive) < 0 || int(m.Drive) >= len(driveNames) {
		refuse("drive", int32(m.Drive), "background, stepped")
	}
	if int(m.Schedule) < 0 || int(m.Schedule) >= len(scheduleNames) {
		refuse("schedule", int32(m.Schedule), "fifo, random, adversarial, priorities")
	}
	return err
}

func machineError(format string, args ...any) *Error {
	return &Error{Op: "Machine", Backend: Emulated, Device: -1, Err: ErrArgument, Message: fmt.Sprintf(format, args...)}
}

// configured is the machine of the last successful Configure, filled.
var configured struct {
	sync.Mutex
	machine *Machine
}

// Configure replaces the emulated machine of this process; without it the first use makes eight default devices. It
// fails with ErrArgument for a machine that Validate refuses, and while anything of the old one is still allocated unless
// force is set: then all old pointers, streams, events, graphs and communicators are dead and must not be used again.
func Configure(m Machine, force bool) error {
	configured.Lock()
	defer configured.Unlock()
	return configure(m, force)
}

// CurrentMachine gives the emulated machine in use, every default filled in.
func CurrentMachine() Machine {
	configured.Lock()
	defer configured.Unlock()
	if configured.machine == nil {
		return DefaultMachine(defaultDevices)
	}
	m := *configured.machine
	m.Devices, m.UplinkGBs, m.Peer = slices.Clone(m.Devices), slices.Clone(m.UplinkGBs), slices.Clone(m.Peer)
	return m
}

// ConfigureOnce is Configure unless the machine was already configured just like this.
func ConfigureOnce(m Machine) error {
	configured.Lock()
	defer configured.Unlock()
	if configured.machine != nil && len(m.Devices) > 0 && m.filled().equal(*configured.machine) {
		return nil
	}
	return configure(m, false)
}

// configure does it; the caller holds the lock.
func configure(m Machine, force bool) error {
	if err := m.Validate(); err != nil {
		return err
	}
	m = m.filled()
	c := core.EmulatedMachine{
		UplinkGBs: m.UplinkGBs, HostGBs: m.HostGBs, PeerGBs: m.PeerGBs, Peer: m.Peer,
		CopyUs: m.CopyMicros, LaunchUs: m.LaunchMicros, HopUs: m.HopMicros, FlagUs: m.FlagMicros,
		Drive: int32(m.Drive), Schedule: int32(m.Schedule), Seed: m.Seed,
	}
	for _, d := range m.Devices {
		c.Devices = append(c.Devices, core.EmulatedDevice{
			H2DGBs: d.H2DGBs, D2HGBs: d.D2HGBs, DuplexGBs: d.DuplexGBs, MemoryGBs: d.MemoryGBs, KernelHostGBs: d.KernelHostGBs,
			SMs: int32(d.SMs), ResidentBlocks: int32(d.ResidentBlocks), CCMajor: int32(d.CCMajor), CCMinor: int32(d.CCMinor),
			Uplink: int32(d.Uplink) - 1, MemoryBytes: d.MemoryBytes,
		})
	}
	if e := core.EmulatedConfigure(c, force); e != nil {
		return Driver{Emulated}.wrap("Configure", -1, e)
	}
	configured.machine = &m
	return nil
}

// equal compares two filled machines.
func (m Machine) equal(o Machine) bool {
	rows := slices.EqualFunc(m.Peer, o.Peer, func(a, b []bool) bool { return slices.Equal(a, b) })
	return rows && slices.Equal(m.Devices, o.Devices) && slices.Equal(m.UplinkGBs, o.UplinkGBs) &&
		m.HostGBs == o.HostGBs && m.PeerGBs == o.PeerGBs && m.CopyMicros == o.CopyMicros && m.LaunchMicros == o.LaunchMicros &&
		m.HopMicros == o.HopMicros && m.FlagMicros == o.FlagMicros && m.Drive == o.Drive && m.Schedule == o.Schedule && m.Seed == o.Seed
}

func nameOf(names []string, i int32) string {
	if i >= 0 && int(i) < len(names) {
		return names[i]
	}
	return fmt.Sprintf("unknown(%d)", i)
}

func parseName(what string, names []string, text []byte, to *int32) error {
	i := slices.Index(names, string(text))
	if i < 0 {
		return machineError("%s is %.40q; allowed: %v", what, text, names)
	}
	*to = int32(i)
	return nil
}
