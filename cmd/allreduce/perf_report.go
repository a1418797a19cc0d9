package main

import (
	"os"
	"slices"
	"strings"
	"time"

	"gpu.example/allreduce"
	"gpu.example/allreduce/internal/nvml"
)

// perfFormat is the version of perfReport; --check refuses others.
const perfFormat = 1

// perfReport is the JSON of `allreduce perf`.
type perfReport struct {
	Format      int               `json:"format"`
	Date        string            `json:"date"`
	Command     []string          `json:"command"`
	Environment map[string]string `json:"environment"` // GGML_CUDA_* and NCCL_* alone
	Version     string            `json:"version"`
	Backend     string            `json:"backend"`
	Simulated   bool              `json:"simulated"`
	Graph       bool              `json:"graph"` // whether there are rows measured in a graph
	Seed        uint64            `json:"seed"`
	Card        string            `json:"card"`
	Driver      string            `json:"driver"`
	Ranks       int               `json:"ranks"`
	Processes   int               `json:"processes"`
	Type        string            `json:"type"`
	Op          string            `json:"op"`
	Repeats     int               `json:"repeats"`
	Warmup      int               `json:"warmup"`
	BudgetMs    int64             `json:"budget_ms"`
	Checked     bool              `json:"checked"`
	Devices     []runDevice       `json:"devices"`
	NCCL        []perfLibrary     `json:"nccl"`
	Results     []perfRow         `json:"results"`
	AvgBusbw    float64           `json:"average_busbw_gbs"` // over all rows and both places, as nccl-tests' last line
	Wrong       int64             `json:"wrong"`             // ours, all rows
	Overlap     []overlapRow      `json:"overlap"`
	Timeline    *timelineSummary  `json:"timeline,omitempty"`
	Memory      []perfMemory      `json:"memory"`
	Baseline    *baselineReport   `json:"check,omitempty"`
	Seconds     float64           `json:"seconds"`
	Warnings    []string          `json:"warnings"`
	Error       string            `json:"error,omitempty"`
	OK          bool              `json:"ok"`
}

// perfLibrary is one NCCL that was measured.
type perfLibrary struct {
	Library string `json:"library"` // as it was named; "" is the default
	Version string `json:"version"`
	Swept   int    `json:"swept"` // settings tried beside the default
}

// perfTimes are microseconds of one reduction over all samples of all repeats, and bandwidths of the median.
type perfTimes struct {
	Min      float64   `json:"min_us"`
	Median   float64   `json:"median_us"`
	P90      float64   `json:"p90_us"`
	P99      float64   `json:"p99_us"`
	Runs     []float64 `json:"runs_us"` // the median of each repeat
	Lowest   float64   `json:"lowest_run_us"`
	Highest  float64   `json:"highest_run_us"`
	AlgbwGBs float64   `json:"algbw_gbs"`
	BusbwGBs float64   `json:"busbw_gbs"`
	Wrong    int64     `json:"wrong"`
}

// perfRow is a size in a mode, with one choice of wire, path and preference.
type perfRow struct {
	Bytes     int64   `json:"bytes"`
	Count     int64   `json:"count"`
	Type      string  `json:"type"`
	Op        string  `json:"op"`
	Asked     variant `json:"asked"`
	Mode      string  `json:"mode"`
	Path      string  `json:"path"`
	Wire      string  `json:"wire"`
	Reason    string  `json:"reason"`
	Iters     int     `json:"iters"`      // timed reductions of one repeat
	Capped    bool    `json:"capped"`     // fewer than 200, by --budget-ms
	PerSample int     `json:"per_sample"` // reductions between two events
	Launches  int     `json:"launches"`   // of the graph in one repeat; 0: eager

	Ours    perfTimes  `json:"ours"`
	InPlace *perfTimes `json:"in_place,omitempty"`
	Wrong   int64      `json:"wrong"` // ours, both places

	// BoundUs is what bare copies of the same wire bytes take: through a ring of 8 MiB, with the best chunk; for path peer
	// straight to the peers.
	BoundUs        float64 `json:"bound_us,omitempty"`
	BoundChunk     int64   `json:"bound_chunk_bytes,omitempty"`
	Bound16Us      float64 `json:"bound16_us,omitempty"` // the same with 16 MiB
	PercentOfBound float64 `json:"percent_of_bound,omitempty"`
	// ModelUs is T(c*): the bytes with all links busy both ways, and the least that chunks cost. From 1 MiB on the wire.
	ModelUs        float64 `json:"model_us,omitempty"`
	PercentOfModel float64 `json:"percent_of_model,omitempty"`

	NCCLDefault  *ncclRow  `json:"nccl_default,omitempty"` // of the newest library
	NCCLBest     *ncclRow  `json:"nccl_best,omitempty"`    // the fastest of the newest library's settings
	RatioDefault float64   `json:"ratio_default,omitempty"`
	Ratio        float64   `json:"ratio,omitempty"` // NCCL's best / ours, the median over the repeats of the run it was measured in
	NCCL         []ncclRow `json:"nccl_rows,omitempty"`
}

// ncclRow is NCCL with one setting, and us in the same process, repeat by repeat in turn.
type ncclRow struct {
	Library  string    `json:"library"`
	Version  string    `json:"version"`
	Settings string    `json:"settings"` // "default", or such as "NCCL_ALGO=Ring NCCL_PROTO=LL"
	Wire     string    `json:"wire"`
	Times    perfTimes `json:"times"`
	OursUs   float64   `json:"ours_us"`
	Ratio    float64   `json:"ratio"`
	Error    string    `json:"error,omitempty"`
}

// perfMemory is the most a path held on a device of any rank, by any of the communicators.
type perfMemory struct {
	Path   string `json:"path"`
	OnGPU  int64  `json:"device_bytes"`
	Pinned int64  `json:"pinned_bytes"`
}

func newPerfReport(j *perfJob) *perfReport {
	r := &perfReport{Format: perfFormat, Date: time.Now().UTC().Format(time.RFC3339), Command: slices.Clone(os.Args),
		Environment: relevantEnvironment(), Version: allreduce.Version(), Backend: j.Backend, Seed: j.Seed, Ranks: j.Ranks, Processes: j.Ranks / ranksHere(j.rank, j.Ranks),
		Graph: slices.Contains(j.Modes, modeGraph), Type: j.Type.String(), Op: j.Op.String(), Repeats: j.Repeats,
		Warmup: j.Warmup, BudgetMs: j.Budget.Milliseconds(), Checked: j.Check, Devices: []runDevice{}, NCCL: []perfLibrary{},
		Results: []perfRow{}, Overlap: []overlapRow{}, Memory: []perfMemory{}, Warnings: []string{}}
	return r
}

// relevantEnvironment keeps what changes results; the rest of an environment holds secrets.
func relevantEnvironment() map[string]string {
	list := map[string]string{}
	for _, entry := range os.Environ() {
		name, value, _ := strings.Cut(entry, "=")
		if strings.HasPrefix(name, "GGML_CUDA_") && name != "GGML_CUDA_AR_SECRET_FILE" || strings.HasPrefix(name, "NCCL_") ||
			name == "CUDA_VISIBLE_DEVICES" || name == "CUDA_MODULE_LOADING" {
			list[name] = value
		}
	}
	return list
}

// describe fills in the devices, as `run` reports them, and the driver.
func (r *perfReport) describe(s *session) error {
	run := runReport{Devices: []runDevice{}, Warnings: []string{}}
	if err := run.describe(s); err != nil {
		return err
	}
	r.Backend, r.Simulated, r.Devices = run.Backend, run.Simulated, run.Devices
	r.Warnings = append(r.Warnings, run.Warnings...)
	var cards []string
	for _, d := range r.Devices {
		if !slices.Contains(cards, d.Name) || r.Simulated {
			cards = append(cards, d.Name)
		}
	}
	r.Card = strings.Join(cards, ", ")
	if r.Simulated {
		r.Card = "emulated"
		return nil
	}
	if info, err := nvml.Query(nvml.Options{}); err == nil {
		r.Driver = info.Driver
	}
	return nil
}

// account fills in the memory held, and the communicators' warnings.
func (r *perfReport) account(rig *perfRig) {
	most := map[allreduce.Path]perfMemory{}
	for _, s := range rig.sides() {
		stats := s.comm.Stats()
		for _, rank := range stats.Ranks {
			for p := range rank.DeviceBytes {
				path := allreduce.Path(p)
				m := most[path]
				most[path] = perfMemory{path.String(), max(m.OnGPU, rank.DeviceBytes[p]), max(m.Pinned, rank.PinnedBytes[p])}
			}
		}
		for _, w := range stats.Warnings {
			r.warn(w)
		}
	}
	for path := range allreduce.Path(len(allreduce.Stats{}.Paths)) {
		if m := most[path]; m.OnGPU > 0 || m.Pinned > 0 {
			r.Memory = append(r.Memory, m)
		}
	}
}

func (r *perfReport) warn(text string) {
	if !slices.Contains(r.Warnings, text) {
		r.Warnings = append(r.Warnings, text)
	}
}

// times sums up a trial. Bandwidths are nccl-tests': busbw is what each link carries if all are used evenly.
func (t *trial) times() perfTimes {
	sorted := slices.Sorted(slices.Values(t.samples))
	at := func(share float64) float64 {
		return round3(sorted[min(int(share*float64(len(sorted))), len(sorted)-1)])
	}
	us := median(t.samples)
	p := perfTimes{Min: round3(sorted[0]), Median: round3(us), P90: at(0.9), P99: at(0.99), Lowest: round3(slices.Min(t.runs)),
		Highest: round3(slices.Max(t.runs)), Wrong: t.wrong}
	for _, run := range t.runs {
		p.Runs = append(p.Runs, round3(run))
	}
	if us > 0 {
		p.AlgbwGBs = round3(float64(t.cell.bytes) / us / 1e3)
		p.BusbwGBs = round3(float64(t.cell.bytes) / us / 1e3 * busFactor(t.rig.job.Ranks))
	}
	return p
}

func busFactor(ranks int) float64 { return 2 * float64(ranks-1) / float64(ranks) }

// row makes the report's row of one of our trials.
func (t *trial) row() perfRow {
	j := t.rig.job
	row := perfRow{Bytes: t.cell.bytes, Count: t.cell.bytes / int64(j.Type.Size()), Type: j.Type.String(), Op: j.Op.String(),
		Asked: t.variant, Mode: t.cell.mode, Wire: t.route.Wire.String(), Iters: t.plan.iters, Capped: t.plan.capped,
		PerSample: t.plan.perSample, Launches: t.plan.launches, Ours: t.times(), Wrong: t.wrong}
	if t.plan.captured > 0 {
		row.PerSample = t.plan.captured
	}
	row.Path, row.Reason = pathTaken(t.route, t.before, t.comm.Stats())
	return row
}

// against makes NCCL's row beside one of our trials.
func (t *trial) against(ours *trial, library, settings string) ncclRow {
	row := ncclRow{Library: library, Version: t.name, Settings: settings, Wire: t.route.Wire.String(), Times: t.times(),
		OursUs: round3(median(ours.samples))}
	var ratios []float64
	for i := range t.runs {
		if ours.runs[i] > 0 {
			ratios = append(ratios, t.runs[i]/ours.runs[i])
		}
	}
	if len(ratios) > 0 {
		row.Ratio = round3(median(ratios))
	}
	return row
}

// choose picks NCCL's default and best of the newest library.
func (row *perfRow) choose() {
	row.NCCLDefault, row.NCCLBest, row.RatioDefault, row.Ratio = nil, nil, 0, 0
	newest := ""
	for _, n := range row.NCCL {
		if n.Error == "" && compareVersions(n.Version, newest) > 0 {
			newest = n.Version
		}
	}
	for i := range row.NCCL {
		n := row.NCCL[i]
		if n.Version != newest || n.Error != "" || n.Times.Wrong > 0 {
			continue
		}
		// A setting's own time may have been measured in another process: ratios, not times, are compared.
		if n.Settings == defaultSettings && row.NCCLDefault == nil {
			row.NCCLDefault, row.RatioDefault = &n, n.Ratio
		}
		if row.NCCLBest == nil || n.Ratio < row.Ratio {
			row.NCCLBest, row.Ratio = &n, n.Ratio
		}
	}
}

// total fills in what nccl-tests prints last.
func (r *perfReport) total() {
	sum, n := 0.0, 0
	r.Wrong = 0
	for i := range r.Results {
		row := &r.Results[i]
		sum, n = sum+row.Ours.BusbwGBs, n+1
		if row.InPlace != nil {
			sum, n = sum+row.InPlace.BusbwGBs, n+1
		}
		r.Wrong += row.Wrong
	}
	if n > 0 {
		r.AvgBusbw = round3(sum / float64(n))
	}
}
