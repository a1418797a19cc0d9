package main

import (
	"context"
	"errors"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"

	"gpu.example/allreduce/device"
	"gpu.example/allreduce/internal/atomicfile"
	"gpu.example/allreduce/internal/nvml"
	"gpu.example/allreduce/internal/verdicts"
)

// probeFlags are the flags of `allreduce probe` as given.
type probeFlags struct {
	backend, devices, emulate, fault, faultPairs string
	cache, jsonFile                              string
	timeout                                      time.Duration
	asJSON                                       bool
}

// probeJob is the same, checked and read.
type probeJob struct {
	backend string
	devices []int // nil: all
	emulate string
	faults  []probeFault
	cache   string // given with --cache
	timeout time.Duration
}

// probeFault is a fault of one ordered pair of the emulated machine.
type probeFault struct {
	From, To int
	Fault    device.PeerFault
}

// faultWords are those of --fault; one-way drops what the lower device of a pair sends.
var faultWords = map[string]device.PeerFault{"none": device.PeerGood, "drop": device.PeerDropped, "delay": device.PeerDelayed,
	"mirror": device.PeerMirrored, "bounce": device.PeerBounced, "hang": device.PeerHang, "one-way": device.PeerDropped}

const (
	// CUDA takes seconds to start on machines with many GPUs; a probe itself takes about one.
	defaultProbeTimeout = 30 * time.Second
	maxProbeTimeout     = time.Hour
	emulatedProbed      = 2 // devices of the emulated machine that are probed unless --devices says otherwise
)

func newProbeCommand(s streams) *cobra.Command { return newProbeCommandOf(s, &probeFlags{}) }

func newProbeCommandOf(s streams, f *probeFlags) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "probe",
		Short: "Prove that GPUs reach each other's memory, pair by pair, with data checked where it arrives",
		Long: `Prove that GPUs reach each other's memory. For each ordered pair, in a process of its own that is ended after --timeout:
copies of the copy engine, stores and loads of a kernel and an exchange of flagged messages, small and above 2 MiB, at odd
offsets, each checked by the owner from its own memory; the same through pinned memory as a control, and a check that must
fail. A driver that grants access proves nothing: machines are known where the bytes never arrived.

Verdicts: ok; slow (right, but slower than through the host); broken; unsupported (the driver denies it); inconclusive (the
control failed too); timeout. They are kept in the cache folder for this boot, driver and these GPUs, where the library reads
them: without a verdict of ok for every pair it does not use peer access (GGML_CUDA_P2P).

Exit codes: 0 every pair is ok or unsupported, 1 a pair is something else, 2 could not run.`,
		Example: `  allreduce probe
  allreduce probe --devices 0,1 --json
  allreduce probe --backend emulated --emulate peer --fault mirror --cache /tmp/verdicts`,
		Args: noArguments,
		RunE: func(cmd *cobra.Command, _ []string) error {
			job, err := f.job()
			if err != nil {
				return err
			}
			return probeAndReport(cmd.Context(), s, f, job)
		},
	}
	flags := cmd.Flags()
	flags.SortFlags = false
	flags.Var(newChoice(&f.backend, "auto", "auto", "cuda", "emulated"), "backend", "`devices` to use: auto (GPUs, else emulated), cuda or emulated")
	flags.StringVar(&f.devices, "devices", "", "`list` of devices such as 0,1 (default: all GPUs, or two emulated devices)")
	flags.DurationVar(&f.timeout, "timeout", defaultProbeTimeout, "`time` after which a pair's process is ended")
	flags.StringVar(&f.cache, "cache", "", "`folder` for the verdicts (default: GGML_CUDA_AR_CACHE_DIR, for GPUs else ~/.cache/allreduce)")
	addEmulate(flags, &f.emulate)
	flags.Var(newChoice(&f.fault, "none", "none", "drop", "delay", "mirror", "bounce", "one-way", "hang"), "fault", "`fault` of the emulated machine's peer access: drop, delay, mirror, bounce, one-way, hang")
	flags.StringVar(&f.faultPairs, "fault-pairs", "", "ordered `pairs` with the fault, such as 0-1,2-0 (default: all)")
	flags.BoolVar(&f.asJSON, "json", false, "print one JSON object")
	flags.StringVar(&f.jsonFile, "json-file", "", "write the JSON object to this `file` as well")
	return cmd
}

// job checks the flags; no device is touched before all of them are good.
func (f *probeFlags) job() (*probeJob, error) {
	j := &probeJob{backend: f.backend, emulate: f.emulate, cache: f.cache, timeout: f.timeout}
	if f.timeout < time.Millisecond || f.timeout > maxProbeTimeout {
		return nil, fmt.Errorf("--timeout %v is not allowed; allowed: 1ms to %v", f.timeout, maxProbeTimeout)
	}
	if f.backend != "emulated" {
		for _, given := range []struct{ flag, value, unset string }{{"--emulate", f.emulate, ""}, {"--fault", f.fault, "none"}} {
			if given.value != given.unset {
				return nil, fmt.Errorf("%s needs --backend emulated", given.flag)
			}
		}
	}
	var err error
	if f.devices != "" {
		if j.devices, err = parseOrdinals("--devices", f.devices, 1<<16); err != nil {
			return nil, err
		}
		for i, d := range j.devices {
			if slices.Contains(j.devices[:i], d) {
				return nil, fmt.Errorf("--devices names device %d twice", d)
			}
		}
	}
	if f.jsonFile != "" {
		if err := atomicfile.Check(f.jsonFile); err != nil {
			return nil, err
		}
	}
	return j, f.readFaults(j)
}

func (f *probeFlags) readFaults(j *probeJob) error {
	if f.fault == "none" {
		if f.faultPairs != "" {
			return errors.New("--fault-pairs needs --fault")
		}
		return nil
	}
	var pairs [][2]int
	if f.faultPairs != "" {
		for part := range strings.SplitSeq(f.faultPairs, ",") {
			from, to, ok := strings.Cut(part, "-")
			ends, err := parseOrdinals("--fault-pairs", from+","+to, device.MaxMachineDevices)
			if !ok || err != nil || ends[0] == ends[1] {
				return fmt.Errorf("--fault-pairs: %.40q is not allowed; allowed: pairs of two devices such as 0-1, separated by commas", part)
			}
			pairs = append(pairs, [2]int{ends[0], ends[1]})
		}
	} else {
		for a := range emulatedDevices {
			for b := range emulatedDevices {
				if a != b && (f.fault != "one-way" || a < b) {
					pairs = append(pairs, [2]int{a, b})
				}
			}
		}
	}
	for _, p := range pairs {
		j.faults = append(j.faults, probeFault{p[0], p[1], faultWords[f.fault]})
	}
	return nil
}

// probeReport is the JSON of `allreduce probe`.
type probeReport struct {
	Backend   string        `json:"backend"`
	Simulated bool          `json:"simulated"`
	Graph     bool          `json:"graph"`
	Seed      uint64        `json:"seed"`
	Fault     string        `json:"fault,omitempty"` // asked for on the emulated machine
	Devices   []probeDevice `json:"devices"`
	Pairs     []probePair   `json:"pairs"`
	Cache     string        `json:"cache,omitempty"` // the file with the verdicts, "" where none was written
	Warnings  []string      `json:"warnings"`
	Error     string        `json:"error,omitempty"`
	OK        bool          `json:"ok"`
}

type probeDevice struct {
	Index int    `json:"index"`
	Name  string `json:"name"`
	UUID  string `json:"uuid"`
	BusID string `json:"bus_id"`
}

// probePair is one ordered pair: whether From may use To's memory.
type probePair struct {
	From          int     `json:"from"`
	To            int     `json:"to"`
	Verdict       string  `json:"verdict"`
	Detail        string  `json:"detail,omitempty"`
	CopyGBs       float64 `json:"copy_gbs"`
	StoreGBs      float64 `json:"store_gbs"`
	StagedGBs     float64 `json:"staged_gbs"`
	LatencyMicros float64 `json:"latency_us"`
}

func (p *probePair) good() bool { return p.Verdict == verdicts.OK || p.Verdict == verdicts.Unsupported }

// probeAndReport runs the job and prints what came out, also where it could not be finished.
func probeAndReport(ctx context.Context, s streams, f *probeFlags, job *probeJob) error {
	report := &probeReport{Backend: job.backend, Devices: []probeDevice{}, Pairs: []probePair{}, Warnings: []string{}}
	if f.fault != "none" {
		report.Fault = f.fault
	}
	err := job.run(ctx, report, s, !f.asJSON)
	good := !slices.ContainsFunc(report.Pairs, func(p probePair) bool { return !p.good() })
	if report.OK = err == nil && good; err != nil {
		report.Error = oneLine(err)
	}
	if !f.asJSON {
		report.print(s)
	} else {
		err = errors.Join(err, writeJSON(s.out, report))
	}
	if f.jsonFile != "" {
		err = errors.Join(err, writeJSONFile(f.jsonFile, report))
	}
	if err == nil && !good {
		return errFinding
	}
	return err
}

func (j *probeJob) run(ctx context.Context, report *probeReport, s streams, talk bool) error {
	if err := emulateMachine(j.emulate, device.Background); err != nil {
		return err
	}
	driver, note, err := pickBackend(j.backend, 1, j.devices)
	if err != nil {
		return err
	}
	if note != "" {
		report.Warnings = append(report.Warnings, note)
	}
	report.Backend, report.Simulated = driver.Backend().String(), driver.Backend() == device.Emulated
	if err := j.describe(driver, report); err != nil {
		return err
	}
	for _, from := range report.Devices {
		for _, to := range report.Devices {
			if from.Index == to.Index {
				continue
			}
			if talk {
				fmt.Fprintf(s.err, "probing device %d to device %d\n", from.Index, to.Index)
			}
			child := probeChildJob{Backend: report.Backend, From: from.Index, To: to.Index, Emulate: j.emulate, Faults: j.faults,
				TimeoutMs: max(j.timeout.Milliseconds()/10, 1)}
			pair, err := child.start(ctx, j.timeout)
			if err != nil {
				return err
			}
			report.Pairs = append(report.Pairs, *pair)
		}
	}
	return j.keep(driver, report)
}

func (j *probeJob) describe(driver device.Driver, report *probeReport) error {
	devices := j.devices
	if devices == nil {
		count, err := driver.Count()
		if err != nil {
			return err
		}
		if report.Simulated {
			count = min(count, emulatedProbed)
		}
		for d := range count {
			devices = append(devices, d)
		}
	}
	if len(devices) < 2 {
		report.Warnings = append(report.Warnings, counted(len(devices), "device")+": there is no pair to probe")
	}
	for _, d := range devices {
		info, err := driver.Info(d)
		if err != nil {
			return err
		}
		report.Devices = append(report.Devices, probeDevice{Index: d, Name: info.Name, UUID: info.UUID, BusID: info.BusID})
	}
	return nil
}

// keep writes the verdicts where the library reads them. Those of emulated devices go only where they were sent to, and
// those under --fault only where --cache says.
func (j *probeJob) keep(driver device.Driver, report *probeReport) error {
	dir, name := j.cache, "GGML_CUDA_AR_CACHE_DIR"
	if dir == "" && report.Fault == "" {
		dir = os.Getenv(name)
	}
	if dir == "" && !report.Simulated {
		base, err := os.UserCacheDir()
		if err == nil {
			dir = filepath.Join(base, "allreduce")
		}
	}
	if dir == "" {
		report.Warnings = append(report.Warnings, "the verdicts are kept nowhere: name a folder with --cache")
		return nil
	}
	about := verdicts.EmulatedDriver
	if driver.Backend() == device.CUDA {
		about = ""
		if info, err := nvml.Query(nvml.Options{}); err == nil {
			about = info.Driver
		}
	}
	key, ok := verdicts.KeyOf(about)
	if !ok {
		report.Warnings = append(report.Warnings, "driver version or boot id are not known, so that the verdicts cannot be kept")
		return nil
	}
	var pairs []verdicts.Pair
	at := map[int]verdicts.Device{}
	for _, d := range report.Devices {
		at[d.Index] = verdicts.Device{UUID: d.UUID, BusID: d.BusID}
	}
	for _, p := range report.Pairs {
		pairs = append(pairs, verdicts.Pair{From: at[p.From], To: at[p.To], Verdict: p.Verdict, Detail: p.Detail,
			CopyGBs: p.CopyGBs, StoreGBs: p.StoreGBs, StagedGBs: p.StagedGBs, LatencyMicros: p.LatencyMicros})
	}
	path := verdicts.Path(dir, report.Backend)
	if err := verdicts.Write(path, key, pairs); err != nil {
		return fmt.Errorf("the verdicts could not be kept: %w", err)
	}
	report.Cache = path
	return nil
}

// print shows a matrix of verdicts, then the numbers of each pair.
func (r *probeReport) print(s streams) {
	kind := ""
	if r.Simulated {
		kind = " (times are simulated)"
	}
	fmt.Fprintf(s.out, "peer access on %s devices%s\n", r.Backend, kind)
	for _, d := range r.Devices {
		fmt.Fprintf(s.out, "device %d: %s, %s, %s\n", d.Index, d.Name, d.BusID, d.UUID)
	}
	if len(r.Pairs) > 0 {
		table := tabwriter.NewWriter(s.out, 0, 0, 2, ' ', 0)
		fmt.Fprint(table, "\nfrom \\ to")
		for _, to := range r.Devices {
			fmt.Fprintf(table, "\t%d", to.Index)
		}
		fmt.Fprintln(table)
		for _, from := range r.Devices {
			fmt.Fprint(table, from.Index)
			for _, to := range r.Devices {
				i := slices.IndexFunc(r.Pairs, func(p probePair) bool { return p.From == from.Index && p.To == to.Index })
				word := "-"
				if i >= 0 {
					word = r.Pairs[i].Verdict
				} else if from.Index != to.Index {
					word = "?"
				}
				fmt.Fprint(table, "\t"+word)
			}
			fmt.Fprintln(table)
		}
		fmt.Fprintln(table, "\npair\tcopy GB/s\tstore GB/s\tthrough the host GB/s\tmessage us\tverdict")
		for _, p := range r.Pairs {
			number := func(v float64) string {
				if v == 0 {
					return "-"
				}
				return fmt.Sprintf("%.1f", v)
			}
			fmt.Fprintf(table, "%d to %d\t%s\t%s\t%s\t%s\t%s", p.From, p.To, number(p.CopyGBs), number(p.StoreGBs), number(p.StagedGBs), number(p.LatencyMicros), p.Verdict)
			if p.Detail != "" {
				fmt.Fprint(table, ": "+p.Detail)
			}
			fmt.Fprintln(table)
		}
		_ = table.Flush()
	}
	for _, w := range r.Warnings {
		fmt.Fprintf(s.out, "note: %s\n", w)
	}
	if r.Cache != "" {
		fmt.Fprintf(s.out, "kept in %s\n", r.Cache)
	}
}

func round1(x float64) float64 { return math.Round(x*10) / 10 }
