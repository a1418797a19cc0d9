package main

import (
	"bytes"
	"context"
	"encoding/csv"
	"encoding/json"
	"encoding/xml"
	"errors"
	"io"
	"math"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"gpu.example/allreduce"
	"gpu.example/allreduce/device"
	"gpu.example/allreduce/internal/testnccl"
)

// quick keeps a run of perf under a second.
var quick = []string{"--backend", "emulated", "-n", "4", "-w", "1", "--repeats", "1", "--bound=false", "--in-place=false"}

func perfJSON(t *testing.T, wantCode int, env []string, args ...string) perfReport {
	t.Helper()
	o := invoke(t, env, append([]string{"perf", "--json"}, args...)...)
	return decodeReport[perfReport](t, wantCode, o)
}

func quickJSON(t *testing.T, wantCode int, env []string, args ...string) perfReport {
	t.Helper()
	return perfJSON(t, wantCode, env, append(append([]string{}, quick...), args...)...)
}

func TestPerfRefusals(t *testing.T) {
	for _, c := range []struct {
		args string
		want []string
	}{
		{"-b 1M -e 1K", []string{"-b 1M is larger than -e 1K"}},
		{"-f 0", []string{"-f 0 is not allowed; allowed: 2 and up"}},
		{"-f 1", []string{"-f 1 is not allowed"}},
		{"-f x", []string{"-f"}},
		{"-b 1KB", []string{`-b: "1KB" is no byte count`}},
		{"-e 2000G", []string{`-e: "2000G" is no byte count`}},
		{"-b 3", []string{"-b 3 is less than one element (4 bytes)"}},
		{"-b 0", []string{"less than one element"}},
		{"-i 0", []string{"-i 0 is not allowed"}},
		{"-i 1K -f 2", []string{"-i and -f cannot be used together"}},
		{"-b 4 -e 1M -i 4", []string{"more than 1000 sizes"}},
		{"-n 0", []string{"-n 0 is not allowed; allowed: 1 to"}},
		{"-w -1", []string{"-w -1 is not allowed"}},
		{"-g 0", []string{"0 ranks are not allowed; allowed: 1 to 8"}},
		{"-g 9", []string{"9 ranks"}},
		{"-d double", []string{`-d "double" is not allowed; allowed: float, half, bfloat16`}},
		{"-o max", []string{"--op", "allowed: sum, avg"}},
		{"-c 2", []string{"-c 2 is not allowed; allowed: 0 to 1"}},
		{"-G -1", []string{"-G -1 is not allowed"}},
		{"--modes fast", []string{`--modes: "fast" is not allowed; allowed: eager, graph`}},
		{"--modes eager -G 3", []string{"--modes eager leaves out the graph"}},
		{"--wire f32,f32", []string{"--wire names f32 twice"}},
		{"--wire f64", []string{`--wire: "f64" is not allowed`}},
		{"-d half --wire bf16", []string{"--wire bf16 is for float payloads; half travels as it is"}},
		{"--path fast", []string{"--path", "allowed: auto, internal, ce"}},
		{"--prefer speed", []string{"--prefer", "allowed: overlap, latency"}},
		{"--vs mpi", []string{"--vs", "allowed: nccl"}},
		{"--vs nccl --nccl-lib=", []string{"--nccl-lib is empty"}},
		{"--backend emulated --vs nccl -b 1K -e 1K", []string{"--vs nccl: ", "nccl cannot be had here"}},
		{"--backend emulated --vs nccl --nccl-lib /no/such.so -b 1K -e 1K", []string{"/no/such.so"}},
		{"--backend emulated --path nccl -b 1K -e 1K", []string{"nccl cannot be had here"}},
		{"--backend emulated --path peer -b 1K -e 1K", []string{"GGML_CUDA_ALLREDUCE=peer"}},
		{"--repeats -1", []string{"--repeats -1 is not allowed"}},
		{"--overlap --overlap-bytes 1", []string{"--overlap-bytes 1 is less than one element"}},
		{"--plot r.png", []string{"--plot r.png: allowed are names that end in .svg or .html"}},
		{"--timeline r.html", []string{"--timeline r.html: allowed are names that end in .svg or .json"}},
		{"--csv /no/such/r.csv", []string{"/no/such/r.csv", "does not exist"}},
		{"--json-file=", []string{"--json-file names no file"}},
		{"--check /no/such.json", []string{"--check /no/such.json", "no such file"}},
		{"--check 1", []string{"-c 0 or 1 is what checks data"}},
		{"--max-bandwidth 100", []string{"--max-bandwidth"}},
		{"--elements 5", []string{"--elements needs --precision"}},
		{"--devices 0 -g 2", []string{"--devices names 1 devices"}},
		{"1M", []string{"takes no arguments"}},
	} {
		t.Run(c.args, func(t *testing.T) {
			o := invoke(t, nil, append([]string{"perf"}, strings.Fields(c.args)...)...)
			requireRefused(t, o, c.want...)
			require.Empty(t, o.out)
		})
	}
	requireRefused(t, invoke(t, nil, "perf-child"), "is for `allreduce perf` alone")
}

func TestPerfSizes(t *testing.T) {
	sizes := func(args ...string) []int64 {
		var f perfFlags
		cmd := newPerfCommand(streams{out: io.Discard, err: io.Discard})
		require.NoError(t, cmd.ParseFlags(args))
		// The command's own flags are not reachable: read them back.
		flags := cmd.Flags()
		f.minBytes, f.maxBytes, f.step = flags.Lookup("minbytes").Value.String(), flags.Lookup("maxbytes").Value.String(), flags.Lookup("stepbytes").Value.String()
		f.factor, _ = flags.GetInt("stepfactor")
		list, err := f.sizes(allreduce.F32, flags.Changed)
		require.NoError(t, err)
		return list
	}
	require.Equal(t, []int64{1 << 10, 4 << 10, 16 << 10}, sizes("-b", "1K", "-e", "16K", "-f", "4"))
	require.Equal(t, []int64{8, 16, 24}, sizes("-b", "8", "-e", "24", "-i", "8"))
	require.Equal(t, []int64{8, 12}, sizes("-b", "10", "-e", "13", "-i", "1"), "whole elements, each once")
	require.Equal(t, int64(8), sizes()[0])
	require.Equal(t, []int64{1 << 30}, sizes("--minbytes", "1G"), "-e follows")
}

func TestPerfPlan(t *testing.T) {
	j := perfJob{Budget: 30 * time.Millisecond}
	eager, graph := cell{bytes: 4, mode: modeEager}, cell{bytes: 4, mode: modeGraph}
	require.Equal(t, plan{iters: 200, perSample: 10, batch: 60, lead: 3}, j.plan(eager, 5*time.Microsecond, 63))
	require.Equal(t, plan{iters: 150, capped: true, perSample: 1, batch: 60, lead: 3}, j.plan(eager, 200*time.Microsecond, 63))
	require.Equal(t, plan{iters: 2, capped: true, perSample: 1, batch: 2, lead: 1}, j.plan(eager, time.Second, 3))
	require.Equal(t, plan{iters: 200, perSample: 1, captured: 20, launches: 10}, j.plan(graph, 5*time.Microsecond, 63))
	j.Launches = 7
	require.Equal(t, plan{iters: 140, perSample: 1, captured: 20, launches: 7}, j.plan(graph, 5*time.Microsecond, 63))
	j.Iters = 100
	require.Equal(t, plan{iters: 700, perSample: 1, captured: 100, launches: 7}, j.plan(graph, time.Second, 3))
	graph.inPlace = true
	require.Equal(t, plan{iters: 21, perSample: 1, captured: 3, launches: 7}, j.plan(graph, time.Second, 3))
}

// The columns are those of nccl-tests, in their order, with ours behind them.
func TestPerfText(t *testing.T) {
	o := invoke(t, nil, "perf", "--backend", "emulated", "-b", "1K", "-e", "1M", "-f", "32", "-n", "20", "-w", "1", "--repeats", "2")
	require.Equal(t, exitGood, o.code, o.err)
	require.Regexp(t, `# +size +count +type +redop +root +time +algbw +busbw +#wrong +time +algbw +busbw +#wrong +min +median +p90 +p99 +path +wire +mode +iters +bound +% +T\(c\*\) +%\n`, o.out)
	number := `\d+(\.\d+)?`
	row := regexp.MustCompile(`(?m)^ +1048576 +262144 +float +sum +-1 +` + strings.Repeat(number+` +`+number+` +`+number+` +0 +`, 2) +
		strings.Repeat(number+` +`, 4) + `copy-engine bf16 eager +20( +` + number + `){2}$`)
	require.Regexp(t, row, o.out)
	require.Contains(t, o.out, "SIMULATED")
	require.Contains(t, o.out, "# Out of bounds values : 0 OK")
	require.Regexp(t, `# Avg bus bandwidth    : `+number, o.out)
	require.Contains(t, o.out, "# memory of a rank at most, copy-engine: device 16 MiB, pinned 8 MiB")
	require.NotContains(t, o.out, "nccl")
}

func TestPerfJSONFields(t *testing.T) {
	file := filepath.Join(t.TempDir(), "r.json")
	o := invoke(t, []string{"SECRET=1", "GGML_CUDA_AR_PREFER=latency"}, "perf", "--backend", "emulated", "-b", "64K", "-e", "2M", "-f", "32",
		"--modes", "eager,graph", "-n", "4", "-w", "1", "--json", "--json-file", file)
	require.Equal(t, exitGood, o.code, o.err)
	written, err := os.ReadFile(file)
	require.NoError(t, err)
	require.Equal(t, o.out, string(written))
	var report map[string]any
	require.NoError(t, json.Unmarshal(written, &report))
	for _, field := range []string{"format", "date", "command", "environment", "version", "backend", "simulated", "graph", "seed", "card", "driver",
		"ranks", "devices", "nccl", "results", "average_busbw_gbs", "wrong", "overlap", "memory", "seconds", "warnings", "ok"} {
		require.Contains(t, report, field)
	}
	require.Equal(t, map[string]any{"GGML_CUDA_AR_PREFER": "latency"}, report["environment"], "nothing else of the environment")
	results := report["results"].([]any)
	require.Len(t, results, 4)
	for _, field := range []string{"bytes", "count", "type", "op", "asked", "mode", "path", "wire", "reason", "iters", "capped", "per_sample",
		"launches", "ours", "in_place", "wrong", "bound_us", "bound_chunk_bytes", "bound16_us", "percent_of_bound",
		"model_us", "percent_of_model"} {
		require.Contains(t, results[3], field)
	}
	times := results[3].(map[string]any)["ours"].(map[string]any)
	for _, field := range []string{"min_us", "median_us", "p90_us", "p99_us", "runs_us", "lowest_run_us", "highest_run_us", "algbw_gbs", "busbw_gbs", "wrong"} {
		require.Contains(t, times, field)
	}
	require.Equal(t, []any{}, report["warnings"], "an empty list, not null")
	require.Equal(t, []any{}, report["overlap"])

	var typed perfReport
	require.NoError(t, json.Unmarshal(written, &typed))
	require.True(t, typed.Simulated && typed.Graph && typed.OK)
	last := typed.Results[3]
	require.Equal(t, "copy-engine", last.Path, "latency prefers the engines from 1 MiB on: %s", last.Reason)
	require.InDelta(t, 100*last.BoundUs/last.Ours.Median, last.PercentOfBound, 0.1)
	require.Greater(t, last.PercentOfBound, 60.0)
	require.LessOrEqual(t, last.PercentOfBound, 105.0)
	require.LessOrEqual(t, last.Ours.Min, last.Ours.Median)
	require.LessOrEqual(t, last.Ours.Median, last.Ours.P99)
	require.Equal(t, 4, last.Iters)
	require.Equal(t, 1, last.Launches)
}

// The bytes alone with every link busy both ways, and the least that chunks add: k is 1 with two ranks, else 3.
func TestPerfModel(t *testing.T) {
	require.InDelta(t, 349.5+2*math.Sqrt(349.5*3), bestTime(349.5, 2), 1e-9)
	require.InDelta(t, 349.5+2*math.Sqrt(3*349.5*3), bestTime(349.5, 3), 1e-9)
	args := []string{"--wire", "f32", "-n", "2", "--bound", "-g"}
	row := quickJSON(t, exitGood, nil, append(args, "2", "-b", "4M", "-e", "4M")...).Results[0]
	require.InEpsilon(t, bestTime(4<<20/46e3, 2), row.ModelUs, 0.02, "host memory carries four flows of 46 GB/s")
	require.InDelta(t, 100*row.ModelUs/row.Ours.Median, row.PercentOfModel, 0.1)
	require.Zero(t, quickJSON(t, exitGood, nil, append(args, "2", "-b", "64K", "-e", "64K")...).Results[0].ModelUs)

	// Eight ranks: host memory carries 8 + 14 times the bytes.
	row = quickJSON(t, exitGood, nil, append(args, "8", "-b", "1M", "-e", "1M")...).Results[0]
	require.InEpsilon(t, bestTime(22<<20/184e3, 8), row.ModelUs, 0.05)
}

// One card of two in an x4 slot: 2.6 MB within 1.1 T(c*).
func TestPerfUnequalLinks(t *testing.T) {
	const machine = "../../docs/machines/pcie4-x16-and-x4.json"
	if _, err := os.Stat(machine); err != nil {
		t.Skip("needs the source tree")
	}
	report := quickJSON(t, exitGood, []string{"GGML_CUDA_AR_EMULATED=" + machine}, "--wire", "f32", "-b", "2600000", "-e", "2600000",
		"--modes", "eager,graph", "--bound")
	for _, row := range report.Results {
		require.InEpsilon(t, bestTime(2.6e6/2.8e3, 2), row.ModelUs, 0.02)
		require.Greater(t, row.PercentOfModel, 100/1.1)
	}
}

// Everything is checked, in both places, for every type, with any number of ranks.
func TestPerfData(t *testing.T) {
	for _, args := range []string{"-d half", "-d bfloat16 -o avg", "-g 3", "-g 3 -o avg", "-g 3 -o avg --wire bf16", "-g 1", "--path ce,internal",
		"-G 3", "-G 2 -n 70", "--wire f32,bf16,f16 --modes eager,graph", "--prefer overlap,latency"} {
		t.Run(args, func(t *testing.T) {
			report := perfJSON(t, exitGood, nil, append([]string{"--backend", "emulated", "-b", "1000", "-e", "1M", "-f", "1000", "-n", "5",
				"-w", "1", "--repeats", "2", "--bound=" + map[bool]string{true: "true", false: "false"}[args == "-g 3"]}, strings.Fields(args)...)...)
			require.Zero(t, report.Wrong)
			require.True(t, report.Checked)
			for _, row := range report.Results {
				require.NotNil(t, row.InPlace)
				require.Len(t, row.Ours.Runs, 2)
				require.Positive(t, row.Ours.Median)
			}
		})
	}
}

func TestPerfFinding(t *testing.T) {
	noop := []string{"GGML_CUDA_AR_NOOP=1"}
	report := perfJSON(t, exitFinding, noop, "--backend", "emulated", "-b", "1K", "-e", "1M", "-f", "1024", "-n", "4", "-w", "1", "--repeats", "2",
		"--modes", "eager,graph")
	require.False(t, report.OK)
	require.Empty(t, report.Error)
	for _, row := range report.Results {
		// Out of place every element is the poison; in place it is this rank's input, which may equal the sum.
		require.GreaterOrEqual(t, row.Ours.Wrong, 2*2*4*row.Count, "%d bytes, %s", row.Bytes, row.Mode)
		require.Positive(t, row.InPlace.Wrong)
		require.Equal(t, row.Ours.Wrong+row.InPlace.Wrong, row.Wrong)
	}
	o := invoke(t, noop, append([]string{"perf", "-b", "1K", "-e", "1K"}, quick...)...)
	require.Equal(t, exitFinding, o.code)
	require.Regexp(t, `# Out of bounds values : \d+ FAILED`, o.out)

	o = invoke(t, noop, append([]string{"perf", "-b", "1K", "-e", "1K", "-c", "0"}, quick...)...)
	require.Equal(t, exitGood, o.code, "not looked at: %s", o.err)
	require.Contains(t, o.out, "not checked")
	require.Contains(t, o.out, "N/A")
}

func TestPerfCSV(t *testing.T) {
	file := filepath.Join(t.TempDir(), "r.csv")
	report := quickJSON(t, exitGood, nil, "-b", "1K", "-e", "1M", "-f", "32", "--csv", file)
	in, err := os.Open(file)
	require.NoError(t, err)
	defer in.Close()
	rows, err := csv.NewReader(in).ReadAll()
	require.NoError(t, err)
	require.Len(t, rows, 1+len(report.Results))
	for i, column := range perfColumns {
		require.Equal(t, column.name, rows[0][i])
	}
	require.Equal(t, []string{"1024", "256", "f32", "sum"}, rows[1][:4])
	require.Equal(t, "true", rows[1][len(perfColumns)-1])
}

// requireXML asserts that a file is well-formed, and gives its text.
func requireXML(t *testing.T, path string) string {
	t.Helper()
	text, err := os.ReadFile(path)
	require.NoError(t, err)
	decoder := xml.NewDecoder(strings.NewReader(string(text)))
	elements := 0
	for {
		token, err := decoder.Token()
		if errors.Is(err, io.EOF) {
			break
		}
		require.NoError(t, err)
		if start, ok := token.(xml.StartElement); ok {
			if elements++; elements == 1 {
				require.Equal(t, "svg", start.Name.Local)
			}
		}
	}
	require.Greater(t, elements, 30)
	return string(text)
}

func TestPerfPlots(t *testing.T) {
	folder := t.TempDir()
	svg, page := filepath.Join(folder, "r.svg"), filepath.Join(folder, "r.html")
	quickJSON(t, exitGood, nil, "-b", "1K", "-e", "1M", "-f", "32", "--modes", "eager,graph", "--bound=true", "--plot", svg)
	text := requireXML(t, svg)
	for _, word := range []string{"ours, eager", "ours, graph", "bound (bare copies)", "microseconds", "bus bandwidth, GB/s", "SIMULATED", ">16K<"} {
		require.True(t, strings.Contains(text, word), word)
	}
	quickJSON(t, exitGood, nil, "-b", "1K", "-e", "1K", "--plot", page)
	html, err := os.ReadFile(page)
	require.NoError(t, err)
	for _, word := range []string{"<!DOCTYPE html>", "<svg", "SIMULATED", "<td>1024</td>", "internal"} {
		require.Contains(t, string(html), word)
	}
	require.NotContains(t, string(html), "<?xml")
}

// A line for each repeat, as benchstat reads them.
func TestPerfBenchmarkLines(t *testing.T) {
	o := invoke(t, nil, append([]string{"perf", "--format", "bench", "-b", "1K", "-e", "32K", "-f", "32", "--wire", "bf16"}, append(quick, "--repeats", "3")...)...)
	require.Equal(t, exitGood, o.code, o.err)
	lines := regexp.MustCompile(`(?m)^BenchmarkAllReduce/bytes=(1|32)K/type=f32/op=sum/wire=bf16/mode=eager/place=out/side=ours-2\t +4\t +\d+\.\d ns/op\t +\d+\.\d\d MB/s$`)
	require.Len(t, lines.FindAllString(o.out, -1), 2*3, o.out)
	require.Contains(t, o.out, "pkg: gpu.example/allreduce\n")
	require.Contains(t, o.out, "clock: simulated\n")
}

func TestPerfTimeline(t *testing.T) {
	folder := t.TempDir()
	svg, file := filepath.Join(folder, "t.svg"), filepath.Join(folder, "t.json")
	report := quickJSON(t, exitGood, nil, "-b", "16M", "-e", "16M", "-n", "2", "--timeline", file)
	text, err := os.ReadFile(file)
	require.NoError(t, err)
	var timeline timelineSummary
	require.NoError(t, json.Unmarshal(text, &timeline))
	require.Equal(t, int64(16<<20), timeline.Bytes)
	require.Len(t, timeline.Devices, 2)
	require.Greater(t, timeline.Duplex, 0.6, "both directions at once")
	kinds := map[string]int64{}
	for _, o := range timeline.Operations {
		require.LessOrEqual(t, o.Start, o.End)
		kinds[o.Kind] += o.Bytes
	}
	require.Len(t, kinds, 4)
	require.Equal(t, int64(16<<20), kinds["up"], "8 MiB of BF16 from each rank")
	require.Equal(t, int64(16<<20), kinds["down"])
	require.Equal(t, timeline.Duplex, report.Timeline.Duplex)
	require.Empty(t, report.Timeline.Operations)

	o := invoke(t, nil, append([]string{"perf", "-b", "2M", "-e", "2M", "--timeline", svg}, quick...)...)
	require.Equal(t, exitGood, o.code, o.err)
	require.Contains(t, o.out, "# timeline (simulated): 2 MiB, copy-engine, wire bf16")
	require.Contains(t, requireXML(t, svg), "duplex")
}

func TestBusy(t *testing.T) {
	require.Equal(t, 5.0, busy([]span{{4, 6}, {0, 2}, {1, 3}, {5, 6}}))
	require.Zero(t, busy(nil))
}

// The bare copies of the bound, eager and in a graph, which emulated runs leave out.
func TestPerfBound(t *testing.T) {
	driver, err := device.Open(device.Emulated)
	require.NoError(t, err)
	for _, ranks := range []int{2, 3} {
		const wire = 3 << 20
		job := &perfJob{Ranks: ranks, Devices: make([]int, ranks), Sizes: []int64{wire}, Variants: []variant{{}}, Seed: 1}
		for rank := range job.Devices {
			job.Devices[rank] = rank % 2
		}
		rig, err := openRig(context.Background(), driver, job, "")
		require.NoError(t, err)
		defer rig.close()
		b, err := rig.newBounder()
		require.NoError(t, err)
		eager, err := b.measure(wire, defaultRing, 1<<20, false)
		require.NoError(t, err)
		graph, err := b.measure(wire, defaultRing, 1<<20, true)
		require.NoError(t, err)
		require.InEpsilon(t, eager, graph, 0.4)
		require.Greater(t, graph, 60.0, "3 MiB at 48 GB/s")
		if ranks == 2 {
			require.Less(t, graph, 110.0)
			got := make([]byte, wire) // each rank has the other's values
			want := make([]byte, wire)
			for rank, dev := range rig.devices {
				require.NoError(t, driver.CopyToHost(dev, got, rig.arena.recv[rank]))
				require.NoError(t, driver.CopyToHost(rig.devices[1-rank], want, rig.arena.send[1-rank]))
				require.True(t, bytes.Equal(want, got))
			}
		}
	}
	require.Equal(t, []int64{256 << 10, 512 << 10, 1 << 20, 2 << 20, 4 << 20}, boundChunks(64<<20, 8<<20))
	require.Equal(t, []int64{256 << 10, 300 << 10}, boundChunks(300<<10, 8<<20))
	require.Equal(t, []int64{8}, boundChunks(8, 8<<20))
}

func TestPerfCheck(t *testing.T) {
	folder := t.TempDir()
	file := filepath.Join(folder, "base.json")
	args := []string{"-b", "64K", "-e", "2M", "-f", "32"}
	base := quickJSON(t, exitGood, nil, append(args, "--json-file", file)...)
	same := quickJSON(t, exitGood, nil, append(args, "--check", file)...)
	require.Equal(t, 2, same.Baseline.Compared)
	require.Zero(t, same.Baseline.Worse)
	require.Equal(t, base.Date, same.Baseline.Date)

	rewrite := func(change func(*perfReport)) string {
		text, err := os.ReadFile(file)
		require.NoError(t, err)
		var r perfReport
		require.NoError(t, json.Unmarshal(text, &r))
		change(&r)
		text, err = json.Marshal(r)
		require.NoError(t, err)
		path := filepath.Join(folder, "changed.json")
		require.NoError(t, os.WriteFile(path, text, 0o600))
		return path
	}
	faster := rewrite(func(r *perfReport) {
		r.Results[0].Ours.Median /= 1.3   // time, 15 %
		r.Results[1].Ours.BusbwGBs *= 1.1 // bandwidth, 5 %
	})
	worse := quickJSON(t, exitFinding, nil, append(args, "--check", faster)...)
	require.False(t, worse.OK)
	require.Equal(t, 2, worse.Baseline.Worse)
	require.Equal(t, "time_us", worse.Baseline.Deviations[0].What)
	require.InDelta(t, 30, worse.Baseline.Deviations[0].Percent, 1)
	require.Equal(t, "busbw_gbs", worse.Baseline.Deviations[1].What)
	require.InDelta(t, 9.1, worse.Baseline.Deviations[1].Percent, 1)
	quickJSON(t, exitGood, nil, append(args, "--check", faster, "--max-latency", "40", "--max-bandwidth", "20")...)

	o := invoke(t, nil, append(append([]string{"perf", "--check", faster}, quick...), args...)...)
	require.Equal(t, exitFinding, o.code)
	require.Equal(t, 2, strings.Count(o.out, "# WORSE: "))

	partly := quickJSON(t, exitGood, nil, "-b", "64K", "-e", "64K", "--check", file)
	require.Equal(t, 1, partly.Baseline.Missing)
	require.Contains(t, strings.Join(partly.Warnings, "\n"), "1 rows of the baseline were not measured")

	for name, c := range map[string]struct {
		path, want string
	}{
		"measured":  {rewrite(func(r *perfReport) { r.Simulated = false }), "cannot be compared"},
		"no common": {"", "has no row of this run"},
	} {
		path, sizes := c.path, args
		if path == "" {
			path, sizes = file, []string{"-b", "4K", "-e", "4K"}
		}
		o := invoke(t, nil, append(append([]string{"perf", "--check", path}, quick...), sizes...)...)
		require.Equal(t, exitFailed, o.code, name)
		require.Contains(t, o.err, c.want)
	}
	for _, text := range []string{"{", `{"format": 7, "results": [{}]}`, `{"format": 1}`} {
		path := filepath.Join(folder, "bad.json")
		require.NoError(t, os.WriteFile(path, []byte(text), 0o600))
		requireRefused(t, invoke(t, nil, "perf", "--check", path), "--check "+path)
	}
}

// fewSMs describes a machine whose blocks are quickly emulated.
func fewSMs(t *testing.T) string {
	path := filepath.Join(t.TempDir(), "machine.json")
	one := `{"sms": 16, "resident_blocks": 32}`
	require.NoError(t, os.WriteFile(path, []byte(`{"devices": [`+one+`, `+one+`], "drive": "stepped"}`), 0o600))
	return "GGML_CUDA_AR_EMULATED=" + path
}

func TestPerfOverlap(t *testing.T) {
	report := quickJSON(t, exitGood, []string{fewSMs(t)}, "-b", "1K", "-e", "1K", "--overlap", "--overlap-bytes", "2M")
	require.Len(t, report.Overlap, 6, "three grids, alone and beside us")
	for i, row := range report.Overlap {
		require.Equal(t, []float64{1, 1, 1.5, 1.5, 2, 2}[i], row.BlocksPerSM)
		require.Equal(t, 20, row.Kernels)
		if row.Beside == "nothing" {
			require.Equal(t, 1.0, row.Slowdown)
			continue
		}
		require.Equal(t, "ours", row.Beside)
		require.Equal(t, "copy-engine", row.Path)
		require.Less(t, row.Slowdown, 1.2, "the engines leave the SMs alone; the sums do not, and here are 16 SMs")
	}
	require.InEpsilon(t, 20*48, report.Overlap[0].AloneUs, 0.1)
	require.InEpsilon(t, 2, report.Overlap[2].AloneUs/report.Overlap[0].AloneUs, 0.1, "1.5 blocks per SM are two waves")
}

// Against an emulated NCCL: in turn in this process, and its settings in children that measure us too.
func TestPerfAgainstNCCL(t *testing.T) {
	library := testnccl.Build(t)
	folder := t.TempDir()
	svg := filepath.Join(folder, "r.svg")
	env := []string{"GGML_CUDA_NCCL_LIB=" + library, fewSMs(t), "NCCL_PROTO=Simple"}
	args := []string{"--vs", "nccl", "-b", "64K", "-e", "512K", "-f", "8", "--wire", "f32,bf16", "--modes", "eager,graph", "--repeats", "3"}
	report := quickJSON(t, exitGood, env[:2], append(args, "--plot", svg, "--overlap", "--overlap-bytes", "512K")...)
	require.Equal(t, []perfLibrary{{Version: "2.30.7", Swept: 3}}, report.NCCL)
	require.Len(t, report.Results, 8)
	for _, row := range report.Results {
		require.Equal(t, row.Asked.Wire, row.Wire)
		require.NotNil(t, row.NCCLDefault)
		require.NotNil(t, row.NCCLBest)
		require.Positive(t, row.Ratio)
		require.LessOrEqual(t, row.Ratio, row.RatioDefault)
		require.Zero(t, row.NCCLBest.Times.Wrong)
		var settings []string
		for _, n := range row.NCCL {
			settings = append(settings, n.Settings)
			require.Equal(t, row.Wire, n.Wire, "the same wire on both sides")
			require.Len(t, n.Times.Runs, 3)
			require.Positive(t, n.OursUs)
			require.InEpsilon(t, n.Times.Median/n.OursUs, n.Ratio, 0.5)
		}
		want := []string{defaultSettings, windows, "NCCL_ALGO=Ring NCCL_PROTO=LL", "NCCL_ALGO=Tree NCCL_PROTO=Simple"}
		if row.Wire != row.Type { // converted, so not in the windows
			want = slices.Delete(want, 1, 2)
		}
		require.Equal(t, want, settings)
	}
	beside := map[string]int{}
	for _, row := range report.Overlap {
		beside[row.Beside+" "+row.Settings]++
	}
	require.Equal(t, map[string]int{"nothing ": 3, "ours ": 6, "nccl " + defaultSettings: 3, "nccl " + oneChannel: 3}, beside)
	text := requireXML(t, svg)
	for _, word := range []string{"NCCL best, graph", "NCCL default, eager", "NCCL&#39;s time / ours"} {
		require.True(t, strings.Contains(text, word), word)
	}
	var held []string
	for _, m := range report.Memory {
		held = append(held, m.Path)
	}
	require.Contains(t, held, "nccl")

	// What the user has set wins; a library that is none is a warning beside one that works.
	report = quickJSON(t, exitGood, env, "--vs", "nccl", "--nccl-lib", library, "--nccl-lib", "/no/such.so", "-b", "1K", "-e", "1K")
	require.Equal(t, library, report.NCCL[0].Library)
	require.Empty(t, report.NCCL[1].Version)
	warnings := strings.Join(report.Warnings, "\n")
	require.Contains(t, warnings, "/no/such.so with default: ")
	require.Contains(t, warnings, "NCCL_PROTO is set")
	require.Len(t, report.Results[0].NCCL, 2)
	require.Equal(t, windows, report.Results[0].NCCL[1].Settings)
	require.Zero(t, report.Results[0].NCCL[1].Times.Wrong)

	o := invoke(t, env, append([]string{"perf", "--vs", "nccl", "--sweep", "none", "-b", "1K", "-e", "1K"}, quick...)...)
	require.Equal(t, exitGood, o.code, o.err)
	require.Regexp(t, `iters +nccl ratio\n`, o.out)
	require.Regexp(t, `# +1K eager f32  internal +\d+\.\d+ +\d+\.\d+ +\d+\.\d+ +\d+\.\d+ +\d+\.\d+  2\.30\.7 default\n`, o.out)

	failing := quickJSON(t, exitFailed, append(env, "AR_EMULATED_NCCL=call"), "--vs", "nccl", "-b", "1K", "-e", "1K")
	require.Contains(t, failing.Error, "NCCL")
	require.False(t, failing.OK)
}

func TestPerfChoose(t *testing.T) {
	row := perfRow{NCCL: []ncclRow{
		{Version: "2.28.3", Settings: defaultSettings, Ratio: 1.1},
		{Version: "2.30.7", Settings: defaultSettings, Ratio: 2},
		{Version: "2.30.7", Settings: "NCCL_ALGO=Tree", Ratio: 1.5},
		{Version: "2.30.7", Settings: "NCCL_PROTO=LL", Ratio: 1, Error: "failed"},
		{Version: "2.30.7", Settings: "NCCL_PROTO=LL128", Ratio: 1, Times: perfTimes{Wrong: 3}},
	}}
	row.choose()
	require.Equal(t, 2.0, row.RatioDefault)
	require.Equal(t, 1.5, row.Ratio)
	require.Equal(t, "NCCL_ALGO=Tree", row.NCCLBest.Settings)
	require.Positive(t, compareVersions("2.30.7", "2.28.3"))
	require.Positive(t, compareVersions("2.9.0", ""))
	require.Zero(t, compareVersions("2.30.7", "2.30.7"))
	require.Equal(t, "2.30.7", ncclVersion(23007))
	require.Equal(t, "2.28.3", ncclVersion(22803))
}
