package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
)

// baselineReport is what --check found.
type baselineReport struct {
	File       string            `json:"file"`
	Date       string            `json:"date"` // the baseline's
	Compared   int               `json:"compared"`
	Worse      int               `json:"worse"`
	Missing    int               `json:"missing"` // rows of the baseline that this run does not have
	Latency    float64           `json:"max_latency_percent"`
	Bandwidth  float64           `json:"max_bandwidth_percent"`
	Deviations []baselineFinding `json:"deviations"` // the rows that are worse
}

// baselineFinding is a row that became worse.
type baselineFinding struct {
	Bytes   int64   `json:"bytes"`
	Asked   variant `json:"asked"`
	Mode    string  `json:"mode"`
	What    string  `json:"what"` // "time_us" or "busbw_gbs"
	Was     float64 `json:"was"`
	Is      float64 `json:"is"`
	Percent float64 `json:"percent"` // by which it is worse
}

// bandwidthFrom is the payload from which on bandwidth is judged instead of time.
const bandwidthFrom = 512 << 10

func readBaseline(path string) (*perfReport, error) {
	text, err := os.ReadFile(path)
	if err != nil {
		var failure *os.PathError
		if errors.As(err, &failure) {
			err = failure.Err
		}
		return nil, fmt.Errorf("--check %s: %w (-c 0 or 1 is what checks data)", path, err)
	}
	var r perfReport
	if err := json.Unmarshal(text, &r); err != nil {
		return nil, fmt.Errorf("--check %s is no report of perf: %w", path, err)
	}
	switch {
	case r.Format != perfFormat:
		return nil, fmt.Errorf("--check %s has format %d; this command writes and reads %d", path, r.Format, perfFormat)
	case len(r.Results) == 0:
		return nil, fmt.Errorf("--check %s has no results", path)
	}
	return &r, nil
}

// compareBaseline looks every row of the baseline up in this run. What cannot be compared at all is an error.
func compareBaseline(f *perfFlags, was, is *perfReport) (*baselineReport, error) {
	if was.Simulated != is.Simulated {
		return nil, fmt.Errorf("--check %s: simulated times and measured ones cannot be compared", f.baseline)
	}
	if was.Card != is.Card || was.Ranks != is.Ranks {
		is.warn(fmt.Sprintf("the baseline was measured on %s with %d ranks", was.Card, was.Ranks))
	}
	b := &baselineReport{File: f.baseline, Date: was.Date, Latency: f.maxLatencyPercent, Bandwidth: f.maxBandwidthPercent,
		Deviations: []baselineFinding{}}
	type key struct {
		bytes         int64
		typ, op, mode string
		asked         variant
	}
	of := func(r *perfRow) key { return key{r.Bytes, r.Type, r.Op, r.Mode, r.Asked} }
	now := map[key]*perfRow{}
	for i := range is.Results {
		now[of(&is.Results[i])] = &is.Results[i]
	}
	for i := range was.Results {
		old := &was.Results[i]
		row := now[of(old)]
		if row == nil {
			b.Missing++
			continue
		}
		b.Compared++
		d := baselineFinding{Bytes: row.Bytes, Asked: row.Asked, Mode: row.Mode}
		limit := f.maxLatencyPercent
		if row.Bytes < bandwidthFrom {
			d.What, d.Was, d.Is = "time_us", old.Ours.Median, row.Ours.Median
			d.Percent = round3(100 * (d.Is/max(d.Was, 1e-9) - 1))
		} else {
			d.What, d.Was, d.Is = "busbw_gbs", old.Ours.BusbwGBs, row.Ours.BusbwGBs
			d.Percent, limit = round3(100*(1-d.Is/max(d.Was, 1e-9))), f.maxBandwidthPercent
		}
		if d.Percent > limit {
			b.Worse++
			b.Deviations = append(b.Deviations, d)
		}
	}
	if b.Compared == 0 {
		return nil, fmt.Errorf("--check %s has no row of this run: it needs the same sizes, type, operation, modes and choices", f.baseline)
	}
	if b.Missing > 0 {
		is.warn(fmt.Sprintf("%d rows of the baseline were not measured", b.Missing))
	}
	return b, nil
}
