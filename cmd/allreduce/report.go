package main

import (
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"math"
	"slices"

	"gpu.example/allreduce"
	"gpu.example/allreduce/device"
	"gpu.example/allreduce/internal/atomicfile"
	"gpu.example/allreduce/internal/nvml"
)

// runReport is the JSON of `allreduce run`.
type runReport struct {
	Backend   string      `json:"backend"`
	Simulated bool        `json:"simulated"`
	Graph     bool        `json:"graph"`
	Seed      uint64      `json:"seed"`
	Ranks     int         `json:"ranks"`
	Processes int         `json:"processes"`
	Iters     int         `json:"iters"`
	Op        string      `json:"op"`
	InPlace   bool        `json:"in_place"`
	Absent    []int       `json:"absent"`
	Devices   []runDevice `json:"devices"`
	Results   []runResult `json:"results"`
	Memory    []runMemory `json:"memory"`
	Warnings  []string    `json:"warnings"`
	Error     string      `json:"error,omitempty"` // why it could not be finished
	OK        bool        `json:"ok"`
}

// runDevice is one device; index is its ordinal as the backend counts.
type runDevice struct {
	Index      int    `json:"index"`
	Ranks      []int  `json:"ranks"`
	Name       string `json:"name"`
	UUID       string `json:"uuid"`
	BusID      string `json:"bus_id"`
	Simulated  bool   `json:"simulated"`
	Capability string `json:"compute_capability"`
	Memory     int64  `json:"memory_bytes"`
	// What the link can do at best: the least of card, slot and hops, from NVML and sysfs; 0: not known.
	PCIeGenMax   int       `json:"pcie_gen_max"`
	PCIeWidthMax int       `json:"pcie_width_max"`
	Peers        []runPeer `json:"p2p"`
}

// runPeer is what is said about peer access to another device of the report. It is not proof.
type runPeer struct {
	Index     int    `json:"index"`
	CanAccess bool   `json:"can_access"` // the driver's word
	Read      string `json:"read"`       // NVML's word: OK, NS, CNS, ...; "" where it was not asked
	Write     string `json:"write"`
}

// runResult is one row.
type runResult struct {
	Bytes      int64   `json:"bytes"`
	Count      int64   `json:"count"`
	Type       string  `json:"type"`
	Path       string  `json:"path"`
	Reason     string  `json:"reason"`
	Wire       string  `json:"wire"`
	TimeUs     float64 `json:"time_us"`
	AlgbwGBs   float64 `json:"algbw_gbs"`
	BusbwGBs   float64 `json:"busbw_gbs"`
	RanksEqual bool    `json:"ranks_equal"`
	Wrong      int64   `json:"wrong"` // elements whose bits differ from the reference, all ranks and checks together
}

func (r runResult) good() bool { return r.RanksEqual && r.Wrong == 0 }

// runMemory is what the library holds for a rank and a path after the last size.
type runMemory struct {
	Rank   int    `json:"rank"`
	Device int    `json:"device"`
	Path   string `json:"path"`
	OnGPU  int64  `json:"device_bytes"`
	Pinned int64  `json:"pinned_bytes"`
}

func newRunReport(j *runJob) *runReport {
	r := &runReport{Backend: j.backend, Graph: j.graph, Seed: j.seed, Ranks: j.ranks, Processes: 1, Iters: j.iters, Op: j.op.String(),
		InPlace: j.inPlace, Absent: []int{}, Devices: []runDevice{}, Results: []runResult{}, Memory: []runMemory{},
		Warnings: []string{}}
	if j.rank != nil {
		r.Processes = j.ranks
	}
	for rank, absent := range j.absent {
		if absent {
			r.Absent = append(r.Absent, rank)
		}
	}
	return r
}

// describe fills in backend and devices.
func (r *runReport) describe(s *session) error {
	r.Backend = s.driver.Backend().String()
	r.Simulated = s.driver.Backend() == device.Emulated
	at := map[int]int{} // ordinal -> index in Devices
	for local, dev := range s.devices {
		rank := s.ranks[local]
		if i, known := at[dev]; known {
			r.Devices[i].Ranks = append(r.Devices[i].Ranks, rank)
			continue
		}
		info, err := s.driver.Info(dev)
		if err != nil {
			return err
		}
		at[dev] = len(r.Devices)
		r.Devices = append(r.Devices, runDevice{Index: dev, Ranks: []int{rank}, Name: info.Name, UUID: info.UUID,
			BusID: info.BusID, Simulated: info.Simulated, Capability: fmt.Sprintf("%d.%d", info.CCMajor, info.CCMinor),
			Memory: info.MemoryBytes, Peers: []runPeer{}})
	}
	for i := range r.Devices {
		for _, peer := range r.Devices {
			if peer.Index == r.Devices[i].Index {
				continue
			}
			can, err := s.driver.CanAccessPeer(r.Devices[i].Index, peer.Index)
			if err != nil {
				return err
			}
			r.Devices[i].Peers = append(r.Devices[i].Peers, runPeer{Index: peer.Index, CanAccess: can})
		}
	}
	if !r.Simulated {
		r.askNVML()
	}
	all, err := together(s, r.Devices)
	if err != nil {
		return err
	}
	r.Devices = slices.Concat(all...)
	return nil
}

// gather joins a row with those of the other processes.
func (r *runResult) gather(s *session, sum []byte) error {
	type part struct {
		Wrong int64
		Equal bool
		Sum   string
		Path  string
	}
	hash := sha256.Sum256(sum)
	mine := part{r.Wrong, r.RanksEqual, hex.EncodeToString(hash[:]), r.Path}
	all, err := gatherJSON(s, mine)
	if err != nil {
		return err
	}
	r.Wrong = 0
	for rank, p := range all {
		r.Wrong += p.Wrong
		r.RanksEqual = r.RanksEqual && p.Equal && p.Sum == mine.Sum
		if p.Path != r.Path {
			return fmt.Errorf("rank %d took %s, rank %d took %s", rank, p.Path, s.ranks[0], r.Path)
		}
	}
	return nil
}

// askNVML adds what NVML and sysfs know of links and peer access. It counts devices in its own order, so bus ids match.
func (r *runReport) askNVML() {
	info, err := nvml.Query(nvml.Options{})
	if err != nil {
		return // the communicator, which wants to know the same, warns of it
	}
	r.Warnings = append(r.Warnings, info.Warnings...)
	at := func(busID string) int {
		return slices.IndexFunc(info.Devices, func(d nvml.Device) bool { return d.BusID == nvml.NormalBusID(busID) })
	}
	for i := range r.Devices {
		d := &r.Devices[i]
		from := at(d.BusID)
		if from < 0 {
			r.Warnings = append(r.Warnings, fmt.Sprintf("NVML does not know device %d (%s)", d.Index, d.BusID))
			continue
		}
		d.PCIeGenMax, d.PCIeWidthMax = info.Devices[from].MaxLink()
		for k := range d.Peers {
			peer := slices.IndexFunc(r.Devices, func(other runDevice) bool { return other.Index == d.Peers[k].Index })
			if to := at(r.Devices[peer].BusID); to >= 0 {
				status := info.P2P[from][to]
				d.Peers[k].Read, d.Peers[k].Write = status.Read.String(), status.Write.String()
			}
		}
	}
}

// account fills in what the library holds, and its warnings.
func (r *runReport) account(s *session) {
	stats := s.comm.Stats()
	defer r.accountAll(s)
	for _, rank := range stats.Ranks {
		for path := range rank.DeviceBytes {
			if rank.DeviceBytes[path] == 0 && rank.PinnedBytes[path] == 0 {
				continue
			}
			r.Memory = append(r.Memory, runMemory{Rank: rank.Rank, Device: rank.Device, Path: allreduce.Path(path).String(),
				OnGPU: rank.DeviceBytes[path], Pinned: rank.PinnedBytes[path]})
		}
	}
	r.Warnings = append(r.Warnings, stats.Warnings...)
}

// accountAll adds what the other processes hold; a communicator that has failed cannot say.
func (r *runReport) accountAll(s *session) {
	if r.Processes <= 1 || s.comm.Err() != nil {
		return
	}
	if all, err := gatherJSON(s, r.Memory); err == nil {
		r.Memory = slices.Concat(all...)
	}
}

// newRunResult makes a row. before and after say which path the calls really took: if it is not the route's, the
// reason says so.
func newRunResult(j *runJob, payload int64, m measured, before, after allreduce.Stats) runResult {
	r := runResult{Bytes: payload, Count: payload / int64(j.typ.Size()), Type: j.typ.String(), Wire: m.route.Wire.String(),
		TimeUs: median(m.micros), RanksEqual: m.equal, Wrong: m.wrong}
	r.Path, r.Reason = pathTaken(m.route, before, after)
	if r.TimeUs > 0 && payload > 0 {
		// The formulas of nccl-tests' PERFORMANCE.md: busbw is what each link carries if all are used evenly.
		r.AlgbwGBs = round3(float64(payload) / r.TimeUs / 1e3)
		r.BusbwGBs = round3(float64(payload) / r.TimeUs / 1e3 * 2 * float64(j.ranks-1) / float64(j.ranks))
	}
	r.TimeUs = round3(r.TimeUs)
	return r
}

// pathTaken is the route's path and reason, or what the calls really took.
func pathTaken(route allreduce.Route, before, after allreduce.Stats) (path, reason string) {
	path, reason = route.Path.String(), route.Reason
	for p := range after.Paths {
		taken := allreduce.Path(p)
		if taken != route.Path && after.Paths[p].Calls > before.Paths[p].Calls {
			path = taken.String()
			reason = fmt.Sprintf("the route was %s (%s), the calls took %s", route.Path, route.Reason, taken)
		}
	}
	return path, reason
}

func round3(x float64) float64 { return math.Round(x*1000) / 1000 }

func writeJSONFile(path string, object any) error {
	return atomicfile.Write(path, func(w io.Writer) error { return writeJSON(w, object) })
}

// deliver writes the JSON of a report that is complete, and gives the command's error: what failed, or the finding.
func deliver(s streams, asJSON bool, file string, report any, ok bool, err error) error {
	if asJSON {
		err = errors.Join(err, writeJSON(s.out, report))
	}
	if file != "" {
		err = errors.Join(err, writeJSONFile(file, report))
	}
	if err == nil && !ok {
		return errFinding
	}
	return err
}
