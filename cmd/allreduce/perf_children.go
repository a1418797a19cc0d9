package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"gpu.example/allreduce/device"
)

// NCCL reads its variables once in a process, so each of its settings is measured in a process of its own: the command runs
// itself as `perf-child`, which reads a childJob from standard input and writes a childReport to descriptor 3 (standard
// output may be NCCL's). A child measures us too, repeat by repeat in turn, so that a ratio never spans two processes.

// childJob is what a child shall do.
type childJob struct {
	Job      perfJob // Libraries has one entry
	Settings string
	Sizes    bool // measure the sizes
}

// childReport is what came out.
type childReport struct {
	Version string
	Rows    []childRow
	Overlap []overlapRow
	Error   string
}

type childRow struct {
	Bytes int64
	Mode  string
	Asked variant
	NCCL  ncclRow
}

const (
	childDescriptor = 3
	childLimit      = 5 * time.Minute
	// A setting of the sweep has a quarter of the budget of the rows.
	sweepBudgetShare = 4
	oneChannel       = "NCCL_MAX_NCHANNELS=1"
	shmMemcpy        = "NCCL_SHM_USE_CUDA_MEMCPY=1"
	shmMemcpyEnds    = "2.30.0" // NCCL has no such mode from here on
	windows          = "symmetric windows"
	windowsBegin     = "2.27.0"
)

func newPerfChildCommand(streams) *cobra.Command {
	return &cobra.Command{
		Use:    "perf-child",
		Short:  "Measure one NCCL setting for perf",
		Hidden: true,
		Args:   noArguments,
		RunE: func(cmd *cobra.Command, _ []string) error {
			out := os.NewFile(childDescriptor, "result")
			var job childJob
			if err := json.NewDecoder(os.Stdin).Decode(&job); err != nil || out == nil || len(job.Job.Libraries) != 1 {
				return errors.New("is for `allreduce perf` alone")
			}
			defer out.Close()
			report := job.run(cmd.Context())
			return json.NewEncoder(out).Encode(report)
		},
	}
}

func (c *childJob) run(ctx context.Context) (out childReport) {
	fail := func(err error) childReport {
		if err != nil {
			out.Error = oneLine(err)
		}
		return out
	}
	j := &c.Job
	if err := emulateMachine(j.Emulate, device.Stepped); err != nil {
		return fail(err)
	}
	driver, _, err := pickBackend(j.Backend, j.Ranks, j.Devices)
	if err != nil {
		return fail(err)
	}
	rig, err := openRig(ctx, driver, j, j.Libraries[0])
	if err != nil {
		return fail(err)
	}
	defer rig.close()
	s, err := rig.ncclSide(rig.wire(rig.ours[0], append(slices.Clone(j.Sizes), j.Overlap...)[0]))
	if err != nil {
		return fail(err)
	}
	out.Version = s.name
	if c.Sizes {
		for _, size := range j.Sizes {
			for _, mode := range j.Modes {
				rows, err := rig.measureCell(ctx, size, mode)
				if err != nil {
					return fail(fmt.Errorf("%d bytes, %s: %w", size, mode, err))
				}
				for _, row := range rows {
					if j.Windows && row.Wire != row.Type {
						continue // converted in a buffer of the path's own
					}
					for _, n := range row.NCCL {
						n.Settings = c.Settings
						out.Rows = append(out.Rows, childRow{row.Bytes, row.Mode, row.Asked, n})
					}
				}
			}
		}
	}
	if len(j.Overlap) > 0 {
		report := perfReport{}
		err = rig.measureOverlap(ctx, &report, nil, c.Settings)
		out.Overlap = report.Overlap
	}
	return fail(err)
}

// start runs a child with more variables and reads its report.
func (c *childJob) start(ctx context.Context, environment []string) (*childReport, error) {
	self, err := os.Executable()
	if err != nil {
		return nil, err
	}
	text, err := json.Marshal(c)
	if err != nil {
		return nil, err
	}
	read, write, err := os.Pipe()
	if err != nil {
		return nil, err
	}
	defer read.Close()
	ctx, cancel := context.WithTimeout(ctx, childLimit)
	defer cancel()
	cmd := exec.CommandContext(ctx, self, "perf-child")
	cmd.Env = append(os.Environ(), environment...)
	cmd.Stdin = bytes.NewReader(text)
	var noise bytes.Buffer
	cmd.Stderr, cmd.Stdout = &noise, &noise
	cmd.ExtraFiles = []*os.File{write}
	cmd.WaitDelay = 5 * time.Second
	if err := cmd.Start(); err != nil {
		_ = write.Close()
		return nil, err
	}
	_ = write.Close()
	result, reading := io.ReadAll(read)
	err = cmd.Wait()
	if err := interrupted(ctx); err != nil {
		if errors.Is(ctx.Err(), context.DeadlineExceeded) {
			err = fmt.Errorf("not done after %v", childLimit)
		}
		return nil, err
	}
	var report childReport
	if err := firstError(err, reading, json.Unmarshal(result, &report)); err != nil {
		lines := strings.Split(strings.TrimSpace(noise.String()), "\n")
		return nil, fmt.Errorf("%w: %s", err, lines[len(lines)-1])
	}
	return &report, nil
}

// sweepSettings lists what is tried beside the default, the likeliest first.
func sweepSettings(sweep string, simulated bool) []string {
	short := []string{"NCCL_ALGO=Ring NCCL_PROTO=LL", "NCCL_ALGO=Tree NCCL_PROTO=Simple"}
	if sweep == "none" {
		return nil
	}
	if sweep == "short" || sweep == "auto" && simulated { // an emulated NCCL is the same whatever it is told
		return short
	}
	list := append(slices.Clone(short), "NCCL_ALGO=Ring NCCL_PROTO=Simple", "NCCL_ALGO=Tree NCCL_PROTO=LL",
		"NCCL_ALGO=Ring NCCL_PROTO=LL128", "NCCL_ALGO=Tree NCCL_PROTO=LL128")
	for _, channels := range []string{"NCCL_MAX_NCHANNELS=2", "NCCL_MIN_NCHANNELS=8"} {
		for _, s := range list[:6] {
			list = append(list, s+" "+channels)
		}
	}
	return list
}

// childRun is one child to start.
type childRun struct {
	library  int // of report.NCCL
	settings string
	sizes    bool
	overlap  bool
	counts   bool // as a setting of the sweep
}

// runChildren measures the other libraries, then the settings of each, the newest library first, until the time is over.
func (j *perfJob) runChildren(ctx context.Context, f *perfFlags, report *perfReport, printer *perfPrinter) error {
	for _, library := range j.Libraries[1:] {
		report.NCCL = append(report.NCCL, perfLibrary{Library: library})
	}
	first := len(report.NCCL)
	var runs []childRun
	for i := 1; i < first; i++ {
		runs = append(runs, childRun{library: i, settings: defaultSettings, sizes: true, overlap: true})
	}
	if len(j.Overlap) > 0 {
		runs = append(runs, childRun{library: 0, settings: oneChannel, overlap: true})
	}
	for _, run := range runs {
		if err := j.runChild(ctx, run, report, printer); err != nil {
			return err
		}
	}
	order := make([]int, len(report.NCCL))
	for i := range order {
		order[i] = i
	}
	slices.SortStableFunc(order, func(a, b int) int { return compareVersions(report.NCCL[b].Version, report.NCCL[a].Version) })
	runs = nil
	for _, i := range order {
		version := report.NCCL[i].Version
		if version == "" {
			continue // it could not be used; a warning says why
		}
		if f.sweep != "none" && compareVersions(version, shmMemcpyEnds) < 0 {
			runs = append(runs, childRun{library: i, settings: shmMemcpy, sizes: true, counts: true})
		}
	}
	for _, i := range order {
		if report.NCCL[i].Version == "" {
			continue
		}
		if f.sweep != "none" && compareVersions(report.NCCL[i].Version, windowsBegin) >= 0 && j.ownWire() {
			runs = append(runs, childRun{library: i, settings: windows, sizes: true, counts: true})
		}
		for _, settings := range sweepSettings(f.sweep, report.Simulated) {
			runs = append(runs, childRun{library: i, settings: settings, sizes: true, counts: true})
		}
	}
	start := time.Now()
	for i, run := range runs {
		if time.Since(start) > time.Duration(f.sweepSeconds)*time.Second {
			report.warn(fmt.Sprintf("%d of %d NCCL settings were not tried: --sweep-seconds %d were over", len(runs)-i, len(runs), f.sweepSeconds))
			break
		}
		if name := alreadySet(run.settings); name != "" {
			report.warn(name + " is set, so NCCL's settings that change it were not tried")
			continue
		}
		if err := j.runChild(ctx, run, report, printer); err != nil {
			return err
		}
	}
	for i := range report.Results {
		report.Results[i].choose()
	}
	return nil
}

// ownWire says whether some variant may travel as the payload is: only then does NCCL work on the caller's memory.
func (j *perfJob) ownWire() bool {
	return slices.ContainsFunc(j.Variants, func(v variant) bool {
		return v.Wire == "" || v.Wire == "auto" || v.Wire == j.Type.String()
	})
}

// alreadySet names a variable of the settings that the user has set: those win.
func alreadySet(settings string) string {
	for entry := range strings.FieldsSeq(settings) {
		name, _, _ := strings.Cut(entry, "=")
		if _, set := os.LookupEnv(name); set {
			return name
		}
	}
	return ""
}

// runChild starts one child and merges its report. What fails in a child is a warning; only an interrupt ends the run.
func (j *perfJob) runChild(ctx context.Context, run childRun, report *perfReport, printer *perfPrinter) error {
	library := &report.NCCL[run.library]
	name := library.Library
	if name == "" {
		name = "NCCL"
	}
	printer.status(fmt.Sprintf("%s, %s", name, run.settings))
	c := childJob{Job: *j, Settings: run.settings, Sizes: run.sizes}
	c.Job.Backend = report.Backend
	c.Job.Libraries = []string{library.Library}
	c.Job.InPlace, c.Job.Bound = false, false
	if run.counts && c.Job.Iters == 0 {
		c.Job.Budget = max(c.Job.Budget/sweepBudgetShare, time.Millisecond)
	}
	if !run.overlap {
		c.Job.Overlap = nil
	}
	var environment []string
	c.Job.Windows = run.settings == windows
	if run.settings != defaultSettings && !c.Job.Windows {
		environment = strings.Fields(run.settings)
	}
	out, err := c.start(ctx, environment)
	if stop := interrupted(ctx); stop != nil {
		return stop
	}
	if err == nil && out.Error != "" {
		err = errors.New(out.Error)
	}
	if err != nil {
		report.warn(fmt.Sprintf("%s with %s: %s", name, run.settings, oneLine(err)))
	}
	if out == nil {
		return nil
	}
	library.Version = firstWord(library.Version, out.Version)
	if run.counts {
		library.Swept++
	}
	report.Overlap = append(report.Overlap, out.Overlap...)
	for _, row := range out.Rows {
		i := slices.IndexFunc(report.Results, func(r perfRow) bool {
			return r.Bytes == row.Bytes && r.Mode == row.Mode && r.Asked == row.Asked
		})
		if i >= 0 {
			report.Results[i].NCCL = append(report.Results[i].NCCL, row.NCCL)
		}
	}
	return nil
}

func firstWord(words ...string) string {
	for _, w := range words {
		if w != "" {
			return w
		}
	}
	return ""
}
