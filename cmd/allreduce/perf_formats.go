package main

import (
	"encoding/csv"
	"fmt"
	"io"
	"runtime"
	"strings"

	"gpu.example/allreduce"
	"gpu.example/allreduce/internal/atomicfile"
)

// perfColumns are the columns of --csv.
var perfColumns = []struct {
	name  string
	value func(*perfReport, *perfRow) any
}{
	{"bytes", func(_ *perfReport, w *perfRow) any { return w.Bytes }},
	{"count", func(_ *perfReport, w *perfRow) any { return w.Count }},
	{"type", func(_ *perfReport, w *perfRow) any { return w.Type }},
	{"op", func(_ *perfReport, w *perfRow) any { return w.Op }},
	{"asked", func(_ *perfReport, w *perfRow) any { return w.Asked.String() }},
	{"mode", func(_ *perfReport, w *perfRow) any { return w.Mode }},
	{"path", func(_ *perfReport, w *perfRow) any { return w.Path }},
	{"wire", func(_ *perfReport, w *perfRow) any { return w.Wire }},
	{"iters", func(_ *perfReport, w *perfRow) any { return w.Iters }},
	{"min_us", func(_ *perfReport, w *perfRow) any { return w.Ours.Min }},
	{"median_us", func(_ *perfReport, w *perfRow) any { return w.Ours.Median }},
	{"p90_us", func(_ *perfReport, w *perfRow) any { return w.Ours.P90 }},
	{"p99_us", func(_ *perfReport, w *perfRow) any { return w.Ours.P99 }},
	{"lowest_run_us", func(_ *perfReport, w *perfRow) any { return w.Ours.Lowest }},
	{"highest_run_us", func(_ *perfReport, w *perfRow) any { return w.Ours.Highest }},
	{"algbw_gbs", func(_ *perfReport, w *perfRow) any { return w.Ours.AlgbwGBs }},
	{"busbw_gbs", func(_ *perfReport, w *perfRow) any { return w.Ours.BusbwGBs }},
	{"in_place_us", func(_ *perfReport, w *perfRow) any {
		return known(w.InPlace, func(p *perfTimes) any { return p.Median })
	}},
	{"in_place_busbw_gbs", func(_ *perfReport, w *perfRow) any {
		return known(w.InPlace, func(p *perfTimes) any { return p.BusbwGBs })
	}},
	{"wrong", func(_ *perfReport, w *perfRow) any { return w.Wrong }},
	{"bound_us", func(_ *perfReport, w *perfRow) any { return positive(w.BoundUs) }},
	{"bound16_us", func(_ *perfReport, w *perfRow) any { return positive(w.Bound16Us) }},
	{"percent_of_bound", func(_ *perfReport, w *perfRow) any { return positive(w.PercentOfBound) }},
	{"model_us", func(_ *perfReport, w *perfRow) any { return positive(w.ModelUs) }},
	{"percent_of_model", func(_ *perfReport, w *perfRow) any { return positive(w.PercentOfModel) }},
	{"nccl_version", func(_ *perfReport, w *perfRow) any {
		return known(w.NCCLBest, func(n *ncclRow) any { return n.Version })
	}},
	{"nccl_default_us", func(_ *perfReport, w *perfRow) any {
		return known(w.NCCLDefault, func(n *ncclRow) any { return n.Times.Median })
	}},
	{"ratio_default", func(_ *perfReport, w *perfRow) any { return positive(w.RatioDefault) }},
	{"nccl_best_us", func(_ *perfReport, w *perfRow) any {
		return known(w.NCCLBest, func(n *ncclRow) any { return n.Times.Median })
	}},
	{"nccl_best", func(_ *perfReport, w *perfRow) any {
		return known(w.NCCLBest, func(n *ncclRow) any { return n.Settings })
	}},
	{"ratio", func(_ *perfReport, w *perfRow) any { return positive(w.Ratio) }},
	{"simulated", func(r *perfReport, _ *perfRow) any { return r.Simulated }},
}

// known is "" for what was not measured.
func known[T any](p *T, value func(*T) any) any {
	if p == nil {
		return ""
	}
	return value(p)
}

func positive(x float64) any {
	if x > 0 {
		return x
	}
	return ""
}

func writePerfCSV(path string, r *perfReport) error {
	return atomicfile.Write(path, func(w io.Writer) error {
		out := csv.NewWriter(w)
		line := make([]string, len(perfColumns))
		for i, c := range perfColumns {
			line[i] = c.name
		}
		_ = out.Write(line) // an error stays until Error
		for k := range r.Results {
			for i, c := range perfColumns {
				line[i] = fmt.Sprint(c.value(r, &r.Results[k]))
			}
			_ = out.Write(line)
		}
		out.Flush()
		return out.Error()
	})
}

// writeBenchmarks prints a line of `go test -bench` for each repeat, for benchstat.
func writeBenchmarks(w io.Writer, r *perfReport) {
	fmt.Fprintf(w, "goos: %s\ngoarch: %s\npkg: gpu.example/allreduce\ncpu: %s\n", runtime.GOOS, runtime.GOARCH, r.Card)
	if r.Simulated {
		fmt.Fprintf(w, "clock: simulated\n")
	}
	for i := range r.Results {
		row := &r.Results[i]
		asked := ""
		if text := strings.ReplaceAll(row.Asked.String(), " ", "/"); text != "" {
			asked = "/" + text
		}
		line := func(side, place string, p *perfTimes) {
			for _, us := range p.Runs {
				fmt.Fprintf(w, "BenchmarkAllReduce/bytes=%s/type=%s/op=%s%s/mode=%s/place=%s/side=%s-%d\t%8d\t%12.1f ns/op\t%10.2f MB/s\n",
					allreduce.FormatBytes(row.Bytes), row.Type, row.Op, asked, row.Mode, place, side, r.Ranks, row.Iters, us*1e3,
					float64(row.Bytes)/max(us, 1e-9))
			}
		}
		line("ours", "out", &row.Ours)
		if row.InPlace != nil {
			line("ours", "in", row.InPlace)
		}
		for k := range row.NCCL {
			n := &row.NCCL[k]
			line("nccl-"+n.Version+"-"+strings.NewReplacer(" ", "-", "=", ":").Replace(n.Settings), "out", &n.Times)
		}
	}
}
