package main

import (
	"bytes"
	"encoding/json"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"gpu.example/allreduce"
	"gpu.example/allreduce/internal/precision"
)

// precise runs a quick job on emulated devices.
func precise(t *testing.T, change func(*precisionJob)) (string, error) {
	t.Helper()
	for _, v := range allreduce.Variables() { // the defaults, whatever the shell has set
		t.Setenv(v.Name, "")
	}
	job := newPrecisionJob()
	job.backend, job.elements, job.tokens = "emulated", 1<<10, 8
	change(job)
	var out, text bytes.Buffer
	err := runPrecision(t.Context(), streams{out: &out, err: &text}, job)
	require.Empty(t, text.String())
	return out.String(), err
}

func TestPrecisionText(t *testing.T) {
	out, err := precise(t, func(j *precisionJob) { j.ranks = []int{2} })
	require.NoError(t, err)
	for _, part := range []string{"on emulated devices, seed 1", "heavy-tailed", "cancelling", "internal copy-engine",
		"model", "KL mean", "100.00 %", "1024 elements are too few to judge", "ok: our sums are bit for bit those of the CPU reference\n"} {
		require.Contains(t, out, part)
	}
}

func TestPrecisionJSON(t *testing.T) {
	file := filepath.Join(t.TempDir(), "precision.json")
	out, err := precise(t, func(j *precisionJob) { j.asJSON, j.jsonFile, j.seed = true, file, 5 })
	require.NoError(t, err)
	written, err := os.ReadFile(file)
	require.NoError(t, err)
	require.Equal(t, out, string(written))

	var report precision.Report
	decoder := json.NewDecoder(bytes.NewReader(written))
	decoder.DisallowUnknownFields()
	require.NoError(t, decoder.Decode(&report))
	require.True(t, report.OK)
	require.True(t, report.Simulated)
	require.EqualValues(t, 5, report.Seed)
	require.Len(t, report.Errors, 2*2*3*2)
	require.Len(t, report.Divergence, 4)

	var fields map[string]any
	require.NoError(t, json.Unmarshal(written, &fields))
	for _, name := range []string{"backend", "simulated", "graph", "seed", "elements", "tokens", "devices", "errors", "divergence",
		"transformer", "findings", "warnings", "ok"} {
		require.Contains(t, fields, name)
	}
	for _, name := range []string{"ranks", "distribution", "by", "wire", "source", "paths", "ranks_equal", "wrong",
		"max", "mean", "rms", "max_ulp", "mean_ulp", "rms_ulp"} {
		require.Contains(t, fields["errors"].([]any)[0], name)
	}
	for _, name := range []string{"by", "wire", "source", "paths", "ranks_equal", "wrong", "kl_mean", "kl_stderr", "kl_max", "same_top"} {
		require.Contains(t, fields["divergence"].([]any)[0], name)
	}
	require.Equal(t, []any{}, fields["findings"], "an empty list, not null")
}

func TestPrecisionRefusals(t *testing.T) {
	for _, c := range []struct {
		change func(*precisionJob)
		want   string
	}{
		{func(j *precisionJob) { j.elements = 0 }, "--elements 0 is not allowed; allowed: 1 to"},
		{func(j *precisionJob) { j.tokens = 1 << 20 }, "--tokens 1048576 is not allowed; allowed: 1 to 65536"},
		{func(j *precisionJob) { j.ranks = []int{1} }, "1 ranks are not allowed with --precision; allowed: 2 to 8"},
		{func(j *precisionJob) { j.ranks = []int{2, 9} }, "9 ranks are not allowed"},
		{func(j *precisionJob) { j.jsonFile = "/no/such/x.json" }, "/no/such/x.json"},
	} {
		out, err := precise(t, c.change)
		require.ErrorContains(t, err, c.want)
		require.Empty(t, out)
	}
}
