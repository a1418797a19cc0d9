package main

import (
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"gpu.example/allreduce"
	"gpu.example/allreduce/internal/atomicfile"
)

// perfFlags are the flags of `allreduce perf` as given. The short ones are those of nccl-tests' all_reduce_perf.
type perfFlags struct {
	backend, devices, typ, op       string
	minBytes, maxBytes, step        string
	factor, iters, warmup           int
	ranks, verify, launches         int
	graph                           bool
	modes, wires, paths, prefers    string
	vs, sweep                       string
	libraries                       []string
	repeats, sweepSeconds, budgetMs int
	seed                            uint64
	inPlace, bound                  bool
	overlap                         bool
	cache, emulate                  string
	overlapBytes                    string
	precision                       bool

	asJSON                                 bool
	format                                 string
	jsonFile, csvFile, plotFile, timeline  string
	baseline                               string
	maxLatencyPercent, maxBandwidthPercent float64
}

// variant is what is asked of our side: each word is a flag's, "" leaves the choice to the environment.
type variant struct {
	Wire   string `json:"wire"`
	Path   string `json:"path"`
	Prefer string `json:"prefer"`
}

// perfJob is the same, checked and read. It travels to the children as JSON.
type perfJob struct {
	Backend   string
	Ranks     int
	Devices   []int
	Type      allreduce.Type
	Op        allreduce.Op
	Sizes     []int64 // payload per rank
	Variants  []variant
	Modes     []string
	Iters     int // of each repeat; 0: defaultIters, fewer where they would take longer than Budget
	Launches  int // of a graph in each repeat; 0: as many as Iters needs
	Warmup    int
	Repeats   int
	Budget    time.Duration // for one repeat of one side
	Check     bool
	InPlace   bool
	Bound     bool
	Seed      uint64
	VsNCCL    bool
	Libraries []string // NCCL libraries; "": the environment's
	Overlap   []int64  // payloads of the reductions beside compute; none: not asked for
	Cache     string   // folder of the peer-access verdicts
	Emulate   string   // what the emulated machine has
	Windows   bool     // what is reduced lies in NCCL's symmetric windows

	rank *allreduce.Rank // of this process, where a launcher started several; nil: all ranks are here
}

const (
	modeEager = "eager"
	modeGraph = "graph"

	defaultIters    = 200
	graphIters      = 20 // captured in one graph unless -n or -G say otherwise
	maxPerfSizes    = 1000
	maxPerfRepeats  = 1000
	repeatsCUDA     = 5
	repeatsEmulated = 2 // the simulated clock repeats itself
	defaultOverlaps = "512K,2M,16M"
)

// datatypes are nccl-tests' words and ours.
var datatypes = map[string]allreduce.Type{"float": allreduce.F32, "half": allreduce.F16, "bfloat16": allreduce.BF16,
	"f32": allreduce.F32, "f16": allreduce.F16, "bf16": allreduce.BF16}

// datatypeNames are nccl-tests' words.
var datatypeNames = map[allreduce.Type]string{allreduce.F32: "float", allreduce.F16: "half", allreduce.BF16: "bfloat16"}

func newPerfCommand(s streams) *cobra.Command { return newPerfCommandOf(s, &perfFlags{}) }

func newPerfCommandOf(s streams, f *perfFlags) *cobra.Command {
	precision := newPrecisionJob()
	cmd := &cobra.Command{
		Use:   "perf",
		Short: "Measure reductions, in the dialect of nccl-tests' all_reduce_perf, and beside NCCL in the same run",
		Long: `Measure reductions, with the flags and columns of nccl-tests' all_reduce_perf, checked in the timed iterations.

Times are medians over repeats of many iterations over rotating buffers. -n iterations make a repeat; unless -n is given
they are 200, or as many as fit into --budget-ms, and the column iters says how many that were. --vs nccl measures NCCL on
the same buffers, repeat by repeat in turn, and then its sweep of algorithms, protocols and channels in processes of their
own that measure us as well. The bound is what bare copies of the same bytes take in this run.

With --launch N, or started by torchrun, mpirun or srun, every rank is a process of its own, and rank 0 reports: the times
are those on its stream. NCCL's sweep, the bound, --overlap and --timeline are left to runs in one process.

On emulated devices the times are the simulated clock's and marked so: they say nothing about this machine.`,
		Example: `  allreduce perf -b 8 -e 128M -f 2
  allreduce perf -b 1K -e 256M -f 4 --wire f32,bf16 --modes eager,graph --vs nccl --json-file r.json --plot r.html
  allreduce perf -b 16M -e 16M --overlap --vs nccl
  allreduce perf -b 1K -e 256M -f 4 --launch 2 --vs nccl
  allreduce perf -b 64K -e 1M -n 20 -w 5 -G 20 -d half
  allreduce perf --format bench >new.txt && benchstat old.txt new.txt`,
		Args: noArguments,
		RunE: func(cmd *cobra.Command, _ []string) error {
			changed := cmd.Flags().Changed
			if f.precision {
				if rank, err := launchedRank(); err != nil || rank != nil {
					return errors.Join(err, errors.New("--precision is for one process; allowed: without --launch, torchrun, mpirun or srun"))
				}
				precision.backend, precision.seed, precision.asJSON, precision.jsonFile = f.backend, f.seed, f.asJSON, f.jsonFile
				if changed("ngpus") {
					precision.ranks = []int{f.ranks}
				}
				return runPrecision(cmd.Context(), s, precision)
			}
			job, err := f.job(changed)
			if err != nil {
				return err
			}
			return perfAndReport(cmd.Context(), s, f, job)
		},
	}
	flags := cmd.Flags()
	flags.SortFlags = false
	flags.SetNormalizeFunc(func(_ *pflag.FlagSet, name string) pflag.NormalizedName {
		return pflag.NormalizedName(strings.ReplaceAll(name, "_", "-")) // nccl-tests writes --warmup_iters
	})
	flags.StringVarP(&f.minBytes, "minbytes", "b", "8", "smallest payload per rank, `bytes` (K, M, G: 1024)")
	flags.StringVarP(&f.maxBytes, "maxbytes", "e", "64M", "largest payload, `bytes`")
	flags.StringVarP(&f.step, "stepbytes", "i", "", "`bytes` from size to size, instead of -f")
	flags.IntVarP(&f.factor, "stepfactor", "f", 2, "`factor` from size to size")
	flags.IntVarP(&f.iters, "iters", "n", 0, "timed `iterations` of each repeat (default 200, capped by --budget-ms)")
	flags.IntVarP(&f.warmup, "warmup-iters", "w", 5, "`iterations` before the timed ones")
	flags.IntVarP(&f.ranks, "ngpus", "g", 2, "`number` of ranks, 1 to 8")
	flags.StringVarP(&f.typ, "datatype", "d", "float", "`type`: float, half or bfloat16")
	flags.VarP(newChoice(&f.op, "sum", "sum", "avg"), "op", "o", "`operation`: sum or avg")
	flags.IntVarP(&f.verify, "verify", "c", 1, "check the data of the timed iterations: `0` or 1")
	flags.IntVarP(&f.launches, "cudagraph", "G", 0, "capture -n iterations (default 20) in a graph and launch it `N` times a repeat")
	flags.BoolVar(&f.graph, "graph", false, "measure in a graph instead of eagerly; the same as --modes graph")
	flags.StringVar(&f.modes, "modes", modeEager, "eager, graph or both: a `list`")
	flags.StringVar(&f.wires, "wire", "", "wire of float payloads: auto, f32, bf16, f16, a `list` (default: the environment's)")
	flags.StringVar(&f.paths, "path", "", "auto, internal, ce, peer, nccl, a `list` (default: the environment's)")
	flags.StringVar(&f.prefers, "prefer", "", "overlap, latency, a `list` (default: the environment's)")
	flags.Var(newChoice(&f.vs, "", "nccl"), "vs", "measure `nccl` as well, side by side, and the ratio")
	flags.StringArrayVar(&f.libraries, "nccl-lib", nil, "NCCL `library`, once for each to measure (default: GGML_CUDA_NCCL_LIB)")
	flags.Var(newChoice(&f.sweep, "auto", "auto", "full", "short", "none"), "sweep", "NCCL settings to try: auto, full, short or none")
	flags.IntVar(&f.sweepSeconds, "sweep-seconds", 180, "`seconds` after which no further setting is tried")
	flags.IntVar(&f.repeats, "repeats", 0, "`number` of repeats, in turn with NCCL's (default 5, on emulated devices 2)")
	flags.IntVar(&f.budgetMs, "budget-ms", 30, "`milliseconds` for one repeat of one side, without -n")
	flags.BoolVar(&f.inPlace, "in-place", true, "measure in place as well")
	flags.BoolVar(&f.bound, "bound", true, "measure the bare copies of the same bytes")
	flags.BoolVar(&f.overlap, "overlap", false, "measure what reductions cost a compute kernel with one block per SM")
	flags.StringVar(&f.overlapBytes, "overlap-bytes", defaultOverlaps, "payloads of the reductions beside it, a `list`")
	flags.StringVar(&f.timeline, "timeline", "", "draw one reduction of -e bytes to this .svg or .json `file`")
	flags.Var(newChoice(&f.backend, "auto", "auto", "cuda", "emulated"), "backend", "`devices` to use: auto (GPUs, else emulated), cuda or emulated")
	flags.StringVar(&f.devices, "devices", "", "device of each rank, a `list` such as 0,1 (default: rank i on device i)")
	addEmulate(flags, &f.emulate)
	flags.StringVar(&f.cache, "cache", "", "`folder` of the peer-access verdicts (default: GGML_CUDA_AR_CACHE_DIR)")
	flags.Uint64Var(&f.seed, "seed", 1, "`number` the inputs depend on")
	flags.BoolVar(&f.asJSON, "json", false, "print one JSON object")
	flags.Var(newChoice(&f.format, "text", "text", "bench"), "format", "`format` of what is printed: text, or bench for benchstat")
	flags.StringVar(&f.jsonFile, "json-file", "", "write the JSON object to this `file` as well")
	flags.StringVar(&f.csvFile, "csv", "", "write the rows to this .csv `file`")
	flags.StringVar(&f.plotFile, "plot", "", "draw time and bus bandwidth to this .svg or .html `file`")
	flags.StringVar(&f.baseline, "check", "", "compare with this JSON `file` of an earlier run; exit 1 where this one is worse")
	flags.Float64Var(&f.maxLatencyPercent, "max-latency", 15, "with --check: `percent` by which times below 512K may be longer")
	flags.Float64Var(&f.maxBandwidthPercent, "max-bandwidth", 5, "with --check: `percent` by which bandwidth from 512K on may be lower")
	flags.BoolVar(&f.precision, "precision", false, "measure errors instead of times: each wire against float64, and what they do to logits")
	precision.register(flags)
	addLaunch(cmd, s, "ngpus")
	return cmd
}

// job checks the flags; no device is touched before all of them are good.
func (f *perfFlags) job(changed func(string) bool) (*perfJob, error) {
	for _, name := range []string{"elements", "tokens"} {
		if changed(name) {
			return nil, fmt.Errorf("--%s needs --precision", name)
		}
	}
	j := &perfJob{Backend: f.backend, Ranks: f.ranks, Seed: f.seed, Warmup: f.warmup, Repeats: f.repeats, Launches: f.launches,
		Budget: time.Duration(f.budgetMs) * time.Millisecond, InPlace: f.inPlace, Bound: f.bound, VsNCCL: f.vs != "",
		Cache: f.cache, Emulate: f.emulate}
	if f.emulate != "" && f.backend == "cuda" {
		return nil, errors.New("--emulate needs --backend emulated")
	}
	var err error
	if j.rank, err = joinLaunched(&j.Ranks, changed("ngpus")); err != nil {
		return nil, err
	}
	if j.Ranks < 1 || j.Ranks > maxRanks {
		return nil, fmt.Errorf("%d ranks are not allowed; allowed: 1 to %d", j.Ranks, maxRanks)
	}
	if err := f.fitProcesses(j, changed); err != nil {
		return nil, err
	}
	for _, n := range []struct {
		flag            string
		value, low, top int
	}{{"-w", f.warmup, 0, maxIters}, {"-G", f.launches, 0, maxIters}, {"--repeats", f.repeats, 0, maxPerfRepeats},
		{"--budget-ms", f.budgetMs, 1, 60_000}, {"--sweep-seconds", f.sweepSeconds, 0, 86_400}, {"-c", f.verify, 0, 1}} {
		if n.value < n.low || n.value > n.top {
			return nil, fmt.Errorf("%s %d is not allowed; allowed: %d to %d", n.flag, n.value, n.low, n.top)
		}
	}
	j.Check = f.verify == 1
	if f.maxLatencyPercent < 0 || f.maxBandwidthPercent < 0 || f.maxBandwidthPercent >= 100 {
		return nil, errors.New("--max-latency and --max-bandwidth are percentages: 0 and up, bandwidth below 100")
	}
	var known bool
	if j.Type, known = datatypes[f.typ]; !known {
		return nil, fmt.Errorf("-d %q is not allowed; allowed: float, half, bfloat16", f.typ)
	}
	if f.op == "avg" {
		j.Op = allreduce.Avg
	}
	if changed("iters") {
		if f.iters < 1 || f.iters > maxIters {
			return nil, fmt.Errorf("-n %d is not allowed; allowed: 1 to %d", f.iters, maxIters)
		}
		j.Iters = f.iters
	}
	if j.Devices, err = parseDevices(f.devices, j.Ranks); err != nil {
		return nil, err
	}
	if j.Sizes, err = f.sizes(j.Type, changed); err != nil {
		return nil, err
	}
	if err := f.readModes(j, changed); err != nil {
		return nil, err
	}
	if err := f.readVariants(j); err != nil {
		return nil, err
	}
	if f.overlap {
		if j.Overlap, err = parseList(f.overlapBytes, func(part string) (int64, error) { return perfBytes("--overlap-bytes", part) }); err != nil {
			return nil, err
		}
		for _, bytes := range j.Overlap {
			if bytes < int64(j.Type.Size()) {
				return nil, fmt.Errorf("--overlap-bytes %d is less than one element", bytes)
			}
		}
	}
	if j.Libraries = f.libraries; len(j.Libraries) == 0 {
		j.Libraries = []string{""}
	}
	if slices.Contains(f.libraries, "") {
		return nil, errors.New("--nccl-lib is empty; allowed: a library's name or path")
	}
	return j, f.checkFiles(j, changed)
}

// fitProcesses refuses what needs all devices in one process, and leaves out what is measured unasked.
func (f *perfFlags) fitProcesses(j *perfJob, changed func(string) bool) error {
	if j.rank == nil {
		return nil
	}
	for flag, asked := range map[string]bool{"--overlap": f.overlap, "--timeline": f.timeline != "", "--bound": changed("bound") && f.bound,
		"--sweep " + f.sweep: f.sweep == "full" || f.sweep == "short", "--nccl-lib more than once": len(f.libraries) > 1} {
		if asked {
			return fmt.Errorf("%s is for one process; allowed: without --launch, torchrun, mpirun or srun", flag)
		}
	}
	j.Bound, f.sweep = false, "none"
	if silent(j.rank) { // rank 0 writes the files
		f.jsonFile, f.csvFile, f.plotFile, f.baseline = "", "", "", ""
	}
	return nil
}

// checkFiles refuses what could not be written at the end.
func (f *perfFlags) checkFiles(j *perfJob, changed func(string) bool) error {
	for _, file := range []struct{ flag, path, allowed string }{
		{"--json-file", f.jsonFile, ""}, {"--csv", f.csvFile, ""},
		{"--plot", f.plotFile, ".svg .html"}, {"--timeline", f.timeline, ".svg .json"},
	} {
		if file.path == "" {
			if changed(strings.TrimPrefix(file.flag, "--")) && !silent(j.rank) {
				return fmt.Errorf("%s names no file", file.flag)
			}
			continue
		}
		if file.allowed != "" && !slices.Contains(strings.Fields(file.allowed), filepath.Ext(file.path)) {
			return fmt.Errorf("%s %s: allowed are names that end in %s", file.flag, file.path, strings.ReplaceAll(file.allowed, " ", " or "))
		}
		if err := atomicfile.Check(file.path); err != nil {
			return err
		}
	}
	return nil
}

func perfBytes(flag, text string) (int64, error) {
	bytes, err := allreduce.ParseBytes(text)
	if err != nil || bytes > maxPayload {
		return 0, fmt.Errorf("%s: %q is no byte count; allowed: whole numbers up to 1024G, K, M or G for 1024, 1024^2, 1024^3", flag, text)
	}
	return bytes, nil
}

// sizes lists the payloads from -b to -e, in whole elements as nccl-tests rounds them.
func (f *perfFlags) sizes(typ allreduce.Type, changed func(string) bool) ([]int64, error) {
	least, err := perfBytes("-b", f.minBytes)
	if err != nil {
		return nil, err
	}
	most, err := perfBytes("-e", f.maxBytes)
	if err != nil {
		return nil, err
	}
	if !changed("maxbytes") {
		most = max(most, least)
	}
	element := int64(typ.Size())
	switch {
	case least > most:
		return nil, fmt.Errorf("-b %s is larger than -e %s", f.minBytes, f.maxBytes)
	case least < element:
		return nil, fmt.Errorf("-b %s is less than one element (%d bytes)", f.minBytes, element)
	case f.factor < 2:
		return nil, fmt.Errorf("-f %d is not allowed; allowed: 2 and up", f.factor)
	}
	step := int64(0)
	if changed("stepbytes") {
		if step, err = perfBytes("-i", f.step); err != nil {
			return nil, err
		}
		if changed("stepfactor") {
			return nil, errors.New("-i and -f cannot be used together")
		}
		if step == 0 {
			return nil, errors.New("-i 0 is not allowed; allowed: 1 and up")
		}
	}
	var list []int64
	for bytes := least; bytes <= most; {
		if len(list) == maxPerfSizes {
			return nil, fmt.Errorf("-b %s -e %s give more than %d sizes: take a larger -i or -f", f.minBytes, f.maxBytes, maxPerfSizes)
		}
		if whole := bytes / element * element; len(list) == 0 || whole != list[len(list)-1] {
			list = append(list, whole)
		}
		switch {
		case step > 0:
			bytes += step
		case bytes > most/int64(f.factor): // the product may not fit
			return list, nil
		default:
			bytes *= int64(f.factor)
		}
	}
	return list, nil
}

func (f *perfFlags) readModes(j *perfJob, changed func(string) bool) error {
	words, err := parseWords("--modes", f.modes, modeEager, modeGraph)
	if err != nil {
		return err
	}
	j.Modes = words
	if f.graph || f.launches > 0 {
		if !changed("modes") {
			j.Modes = []string{modeGraph}
		} else if !slices.Contains(j.Modes, modeGraph) {
			return fmt.Errorf("--modes %s leaves out the graph that --graph or -G asks for", f.modes)
		}
	}
	if slices.Contains(j.Modes, modeGraph) && j.Iters > maxCaptured && j.Launches > 0 {
		return fmt.Errorf("-n %d with -G is not allowed; allowed: 1 to %d", j.Iters, maxCaptured)
	}
	return nil
}

// readVariants makes every combination of --wire, --path and --prefer.
func (f *perfFlags) readVariants(j *perfJob) error {
	none := []string{""}
	wires, paths, prefers := none, none, none
	var err error
	if f.wires != "" {
		if wires, err = parseWords("--wire", f.wires, "auto", "f32", "bf16", "f16"); err != nil {
			return err
		}
		for _, w := range wires {
			if j.Type != allreduce.F32 && w != "auto" && w != j.Type.String() {
				return fmt.Errorf("--wire %s is for float payloads; %s travels as it is", w, datatypeNames[j.Type])
			}
		}
	}
	if f.paths != "" {
		if paths, err = parseWords("--path", f.paths, "auto", "internal", "ce", "copy-engine", "peer", "nccl"); err != nil {
			return err
		}
	}
	if f.prefers != "" {
		if prefers, err = parseWords("--prefer", f.prefers, "overlap", "latency"); err != nil {
			return err
		}
	}
	for _, wire := range wires {
		for _, path := range paths {
			for _, prefer := range prefers {
				j.Variants = append(j.Variants, variant{wire, path, prefer})
			}
		}
	}
	return nil
}

// parseWords reads a list of words, each allowed and named once.
func parseWords(flag, text string, allowed ...string) ([]string, error) {
	var list []string
	for word := range strings.SplitSeq(text, ",") {
		word = strings.TrimSpace(word)
		if !slices.Contains(allowed, word) {
			return nil, fmt.Errorf("%s: %q is not allowed; allowed: %s, separated by commas", flag, word, strings.Join(allowed, ", "))
		}
		if slices.Contains(list, word) {
			return nil, fmt.Errorf("%s names %s twice", flag, word)
		}
		list = append(list, word)
	}
	return list, nil
}
