package main

import (
	"errors"
	"fmt"
	"math"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"gpu.example/allreduce"
	"gpu.example/allreduce/device"
	"gpu.example/allreduce/internal/atomicfile"
)

// soakFlags are the flags of `allreduce soak` as given.
type soakFlags struct {
	backend, devices        string
	ranks                   int
	duration, idle          time.Duration
	calls                   int64
	seed                    uint64
	minBytes, maxBytes      string
	sizes                   string
	paths, types, wires     string
	modes, schedule, mutate string
	asJSON                  bool
	jsonFile                string
}

// soakJob is the same, checked and read.
type soakJob struct {
	backend  string
	ranks    int
	devices  []int // of each rank; nil: rank i on device i
	duration time.Duration
	calls    int64 // 0: no limit
	seed     uint64
	sizes    []int64 // the only payloads; nil: any from least to most
	least    int64
	most     int64
	paths    []string // words of --path, each once
	anyPath  bool     // --paths was not given: a path that cannot be had here is left out
	types    []allreduce.Type
	wires    []string
	eager    bool
	graph    bool
	idle     time.Duration
	schedule device.Schedule
	mutate   string
	command  []string
	rank     *allreduce.Rank // of this process, where a launcher started several; nil: all ranks are here
}

const (
	maxSoak = 30 * 24 * time.Hour
	maxIdle = time.Hour
)

// soakPaths are the words of --paths, in the order they are tried: auto first, whose failure says what is wrong with the
// environment.
var soakPaths = []string{"auto", "internal", "copy-engine", "peer", "nccl"}

func newSoakCommand(s streams) *cobra.Command { return newSoakCommandOf(s, &soakFlags{}) }

func newSoakCommandOf(s streams, f *soakFlags) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "soak",
		Short: "Run random reductions over every path for a stated time, and check every result",
		Long: `Run random reductions over every path that exists here for a stated time, eager ones and replayed graphs mixed, many in
flight before the host waits, and check every result bit for bit against a CPU reference. The first finding ends the run
and is reported in full, with the command that repeats it.

On emulated devices the run is stepped: the same seed and flags give the same run, and a hazard checker watches the order
of every access. On GPUs results are compared where they are.

With --launch N, or started by torchrun, mpirun or srun, every rank is a process of its own: all do the same calls, the
first finding of any rank ends the run, and rank 0 reports. Emulated devices then work as they can, not stepped.`,
		Example: `  allreduce soak --duration 60s --json
  allreduce soak --duration 4m --sizes 4K --idle 3s
  allreduce soak -b 4 -e 64M --paths internal,copy-engine --wire f32,bf16 --seed 7
  allreduce soak --launch 4 --duration 60s
  allreduce soak --backend emulated --ranks 4 --schedule adversarial --duration 10m`,
		Args: noArguments,
		RunE: func(cmd *cobra.Command, _ []string) error {
			job, err := f.job(cmd)
			if err != nil {
				return err
			}
			return soakAndReport(cmd.Context(), s, f, job)
		},
	}
	flags := cmd.Flags()
	flags.SortFlags = false
	flags.DurationVar(&f.duration, "duration", time.Minute, "for how `long`: 60s, 4m, 24h")
	flags.Int64Var(&f.calls, "calls", 0, "end after this `number` of reductions as well (default: no limit)")
	flags.Uint64Var(&f.seed, "seed", 1, "`number` that calls, data and the emulated schedule depend on")
	flags.StringVarP(&f.minBytes, "minbytes", "b", "4", "smallest payload per rank, `bytes` (K, M, G: 1024)")
	flags.StringVarP(&f.maxBytes, "maxbytes", "e", "4M", "largest payload, `bytes`")
	flags.StringVar(&f.sizes, "sizes", "", "these payloads and no others, a `list` such as 4K,1M")
	flags.StringVar(&f.paths, "paths", "", "auto, internal, copy-engine (ce), peer, nccl, a `list` (default: all that exist here)")
	flags.StringVar(&f.types, "types", "f32,f16,bf16", "element types, a `list`")
	flags.StringVar(&f.wires, "wire", "auto,f32,bf16", "wires of f32 payloads: auto, f32, bf16, f16, a `list`")
	flags.StringVar(&f.modes, "modes", "eager,graph", "eager, graph or both: a `list`")
	flags.DurationVar(&f.idle, "idle", 2*time.Second, "longest idle gap; gaps take about a tenth of the time, 0: none")
	flags.IntVar(&f.ranks, "ranks", 2, "`number` of ranks, 2 to 8")
	flags.StringVar(&f.devices, "devices", "", "device of each rank, a `list` such as 0,1 (default: rank i on device i)")
	flags.Var(newChoice(&f.backend, "auto", "auto", "cuda", "emulated"), "backend", "`devices` to use: auto (GPUs, else emulated), cuda or emulated")
	flags.Var(newChoice(&f.schedule, "random", "fifo", "random", "adversarial", "priorities"), "schedule", "`order` in which emulated devices work: fifo, random, adversarial or priorities")
	flags.StringVar(&f.mutate, "mutate", "", "take this ordering `primitive` out (emulated devices)")
	_ = flags.MarkHidden("mutate")
	flags.BoolVar(&f.asJSON, "json", false, "print one JSON object")
	flags.StringVar(&f.jsonFile, "json-file", "", "write the JSON object to this `file` as well")
	addLaunch(cmd, s, "ranks")
	return cmd
}

// job checks the flags; no device is touched before all of them are good.
func (f *soakFlags) job(cmd *cobra.Command) (*soakJob, error) {
	changed := cmd.Flags().Changed
	j := &soakJob{backend: f.backend, ranks: f.ranks, duration: f.duration, calls: f.calls, seed: f.seed, idle: f.idle,
		mutate: f.mutate, anyPath: !changed("paths"), command: repeatable(cmd)}
	var err error
	if j.rank, err = joinLaunched(&j.ranks, changed("ranks")); err != nil {
		return nil, err
	}
	if j.rank != nil {
		if changed("schedule") {
			return nil, errors.New("--schedule is for one process; allowed: without --launch, torchrun, mpirun or srun")
		}
		if silent(j.rank) {
			f.jsonFile = ""
		}
	}
	switch {
	case f.duration <= 0 || f.duration > maxSoak:
		return nil, fmt.Errorf("--duration %s is not allowed; allowed: above 0, up to %s", f.duration, maxSoak)
	case f.calls < 0:
		return nil, fmt.Errorf("--calls %d is not allowed; allowed: 0 (no limit) and up", f.calls)
	case f.idle < 0 || f.idle > maxIdle:
		return nil, fmt.Errorf("--idle %s is not allowed; allowed: 0 to %s", f.idle, maxIdle)
	case j.ranks < 2 || j.ranks > maxRanks:
		return nil, fmt.Errorf("%d ranks are not allowed; allowed: 2 to %d", j.ranks, maxRanks)
	}
	if changed("schedule") && (f.backend == "cuda" || os.Getenv("GGML_CUDA_AR_EMULATED") != "") {
		return nil, errors.New("--schedule is for emulated devices, and not beside GGML_CUDA_AR_EMULATED, whose file says drive and schedule")
	}
	if f.mutate != "" && !slices.ContainsFunc(device.Orders(), func(o device.Order) bool { return o.Name == f.mutate }) {
		var names []string
		for _, o := range device.Orders() {
			names = append(names, o.Name)
		}
		return nil, fmt.Errorf("--mutate: %q is no ordering primitive; allowed: %s", f.mutate, strings.Join(names, ", "))
	}
	err = j.schedule.UnmarshalText([]byte(f.schedule))
	if err != nil {
		return nil, err
	}
	if j.devices, err = parseDevices(f.devices, j.ranks); err != nil {
		return nil, err
	}
	if err := f.readLists(j); err != nil {
		return nil, err
	}
	if err := f.readSizes(j, changed); err != nil {
		return nil, err
	}
	if f.jsonFile != "" {
		err = atomicfile.Check(f.jsonFile)
	}
	return j, err
}

// readLists reads --paths, --types, --wire and --modes.
func (f *soakFlags) readLists(j *soakJob) error {
	j.paths = soakPaths
	if !j.anyPath {
		words, err := parseWords("--paths", f.paths, append(slices.Clone(soakPaths), "ce")...)
		if err != nil {
			return err
		}
		if at := slices.Index(words, "ce"); at >= 0 {
			if words[at] = "copy-engine"; slices.Index(words, "copy-engine") != at || slices.Contains(words[at+1:], "copy-engine") {
				return errors.New("--paths names copy-engine twice")
			}
		}
		j.paths = words
	}
	types, err := parseWords("--types", f.types, "f32", "f16", "bf16")
	if err != nil {
		return err
	}
	for _, word := range types {
		typ, err := allreduce.ParseType(word)
		if err != nil {
			return err
		}
		j.types = append(j.types, typ)
	}
	if j.wires, err = parseWords("--wire", f.wires, "auto", "f32", "bf16", "f16"); err != nil {
		return err
	}
	if !slices.Contains(j.types, allreduce.F32) {
		j.wires = []string{"auto"} // the others travel as they are
	}
	modes, err := parseWords("--modes", f.modes, modeEager, modeGraph)
	j.eager, j.graph = slices.Contains(modes, modeEager), slices.Contains(modes, modeGraph)
	return err
}

// readSizes reads --sizes, or -b and -e.
func (f *soakFlags) readSizes(j *soakJob, changed func(string) bool) (err error) {
	if changed("sizes") {
		if changed("minbytes") || changed("maxbytes") {
			return errors.New("--sizes cannot be used together with -b or -e")
		}
		for _, typ := range j.types {
			if j.sizes, err = parseSizes(f.sizes, typ); err != nil {
				return err
			}
		}
		if j.least, j.most = slices.Min(j.sizes), slices.Max(j.sizes); j.least == 0 {
			return errors.New("--sizes: 0 reduces nothing; allowed: 1 element and up")
		}
		return nil
	}
	if j.least, err = perfBytes("-b", f.minBytes); err != nil {
		return err
	}
	if j.most, err = perfBytes("-e", f.maxBytes); err != nil {
		return err
	}
	if !changed("maxbytes") {
		j.most = max(j.most, j.least)
	}
	const element = 4 // the largest one
	switch {
	case j.least > j.most:
		return fmt.Errorf("-b %s is larger than -e %s", f.minBytes, f.maxBytes)
	case j.least < element:
		return fmt.Errorf("-b %s is less than one element (%d bytes)", f.minBytes, element)
	}
	return nil
}

// size draws a payload: one of the list, or any whole number of elements, each octave as likely as the next.
func (j *soakJob) size(uniform float64, typ allreduce.Type) int64 {
	if j.sizes != nil {
		return j.sizes[min(int(uniform*float64(len(j.sizes))), len(j.sizes)-1)]
	}
	bytes := float64(j.least) * math.Pow(float64(j.most)/float64(j.least), uniform)
	element := int64(typ.Size())
	return max(min(int64(math.Round(bytes)), j.most)/element, 1) * element
}
