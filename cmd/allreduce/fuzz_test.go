package main

import (
	"errors"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"gpu.example/allreduce"
	"gpu.example/allreduce/internal/testfuzz"
)

// The lists of the command line: refused in one line that names the flag, or read as what reads the same when written.
func FuzzLists(f *testing.F) {
	for _, text := range []string{"", "1K,64K,512K,16M", "0,1,7", " 4 , 8 ", "4,,8", "1025G", "-4", "1KB", "0,1", "77777777777", "f32,bf16", "eager,eager", "a\nb", "\x00"} {
		f.Add(text)
	}
	words := []string{"f32", "bf16", "eager", "graph", "internal", "copy-engine"}
	f.Fuzz(func(t *testing.T, text string) {
		testfuzz.Bounded(t, len(text), func() {
			for _, typ := range []allreduce.Type{allreduce.F32, allreduce.F16} {
				sizes, err := parseSizes(text, typ)
				check(t, text, "--sizes", sizes, err, func(n int64) string { return allreduce.FormatBytes(n) },
					func(again string) ([]int64, error) { return parseSizes(again, typ) })
				for _, n := range sizes {
					if n < 0 || n > maxPayload || n%int64(typ.Size()) != 0 {
						t.Fatalf("%q has the size %d", text, n)
					}
				}
				counts, err := parseCounts(text, typ)
				check(t, text, "--counts", counts, err, func(n int64) string { return allreduce.FormatBytes(n / int64(typ.Size())) },
					func(again string) ([]int64, error) { return parseCounts(again, typ) })
			}
			ordinals, err := parseOrdinals("--devices", text, 1<<16)
			check(t, text, "--devices", ordinals, err, func(n int) string { return allreduce.FormatBytes(int64(n)) }, nil)
			named, err := parseWords("--wire", text, words...)
			check(t, text, "--wire", named, err, func(w string) string { return w },
				func(again string) ([]string, error) { return parseWords("--wire", again, words...) })
		})
	})
}

// check asserts what holds for every list.
func check[T comparable](t *testing.T, text, flag string, list []T, err error, write func(T) string, read func(string) ([]T, error)) {
	t.Helper()
	if err != nil {
		testfuzz.OneLine(t, err, len(text), flag)
		return
	}
	if len(list) != strings.Count(text, ",")+1 {
		t.Fatalf("%s %q is read as %v", flag, text, list)
	}
	if read == nil {
		return
	}
	var parts []string
	for _, v := range list {
		parts = append(parts, write(v))
	}
	written := strings.Join(parts, ",")
	if again, err := read(written); err != nil || !slices.Equal(again, list) {
		t.Fatalf("%s %q is read as %v, written %q, and that as %v (%v)", flag, text, list, written, again, err)
	}
}

// Any command line of run, perf and soak: a job, or one line. No device is touched, no file written.
func FuzzCommandLine(f *testing.F) {
	for _, line := range []string{
		"run --sizes 1K,4M --iters 5 --graph", "run --counts 0,1 --absent 0 --type bf16", "run --ranks 9", "run --out x", "run --help",
		"perf -b 8 -e 1G -f 2 --wire f32,bf16 --modes eager,graph", "perf -b 1 -e 1024G -i 1", "perf -b 1M -e 8M -i 4 -f 2", "perf --overlap --overlap-bytes 1",
		"perf -e 1024G -f 9223372036854775807", "perf -b 4 -e 1024G -i 1099511627776", "perf --plot x.gif", "perf --warmup_iters 3",
		"soak --sizes 4K --paths ce,auto --types f16 --wire f16 --modes graph", "soak --duration 1ns --idle 1h --calls 9223372036854775807",
		"soak -b 4 -e 1024G --ranks 8 --devices 0,0,0,0,0,0,0,0", "soak --mutate x", "soak --json-file /no/such/file", "run --json-file a\tb/c",
	} {
		f.Add(line)
	}
	f.Fuzz(func(t *testing.T, line string) {
		args := strings.Split(line, " ")
		if slices.ContainsFunc(args, func(a string) bool { return strings.HasPrefix(a, "--in") && !strings.HasPrefix(a, "--in-place") }) {
			return // reads files; FuzzRead is theirs
		}
		testfuzz.Bounded(t, len(line), func() {
			s := streams{out: io.Discard, err: io.Discard}
			var err error
			switch args[0] {
			case "run":
				run := &runFlags{}
				cmd := newRunCommandOf(s, run)
				if err = cmd.ParseFlags(args[1:]); err == nil {
					_, err = run.job(cmd.Flags().Changed)
				}
			case "perf":
				perf := &perfFlags{}
				cmd := newPerfCommandOf(s, perf)
				if err = cmd.ParseFlags(args[1:]); err == nil {
					var job *perfJob
					if job, err = perf.job(cmd.Flags().Changed); err == nil {
						requireSizes(t, line, job)
					}
				}
			case "soak":
				soak := &soakFlags{}
				cmd := newSoakCommandOf(s, soak)
				if err = cmd.ParseFlags(args[1:]); err == nil {
					var job *soakJob
					if job, err = soak.job(cmd); err == nil {
						for _, u := range []float64{0, 0.5, 1} {
							for _, typ := range job.types {
								if n := job.size(u, typ); n < int64(typ.Size()) || n > max(job.most, int64(typ.Size())) || n%int64(typ.Size()) != 0 {
									t.Fatalf("%q draws %d bytes of %s", line, n, typ)
								}
							}
						}
					}
				}
			}
			if err != nil {
				testfuzz.OneLine(t, errors.New(oneLine(err)), len(line))
			}
		})
	})
}

// requireSizes asserts that sizes ascend in whole elements.
func requireSizes(t *testing.T, line string, job *perfJob) {
	t.Helper()
	last := int64(0)
	for _, n := range job.Sizes {
		if n <= last || n > maxPayload || n%int64(job.Type.Size()) != 0 {
			t.Fatalf("%q has the sizes %v", line, job.Sizes)
		}
		last = n
	}
}

// Any file as perf's baseline: one line, or a comparison.
func FuzzBaseline(f *testing.F) {
	row := `{"bytes":1024,"type":"f32","op":"sum","mode":"eager","ours":{"median_us":3,"busbw_gbs":1}}`
	for _, text := range []string{``, `{}`, `{"format":1}`, `{"format":2,"results":[{}]}`, `{"format":1,"results":[null]}`, `{"format":1,"results":[` + row + `]}`,
		`{"format":1,"results":[` + row + `,` + row + `]}`, `{"format":1,"results":[{"ours":{"median_us":-1e308,"busbw_gbs":0}}]}`, `{"format":"1"}`, `[]`,
	} {
		f.Add([]byte(text))
	}
	folder := f.TempDir()
	f.Fuzz(func(t *testing.T, text []byte) {
		path := filepath.Join(folder, "b.json")
		if err := os.WriteFile(path, text, 0o600); err != nil {
			t.Fatal(err)
		}
		testfuzz.Bounded(t, len(text), func() {
			r, err := readBaseline(path)
			if err == nil {
				_, err = compareBaseline(&perfFlags{baseline: path, maxLatencyPercent: 15, maxBandwidthPercent: 5}, r, r)
			}
			if err != nil {
				testfuzz.OneLine(t, errors.New(oneLine(err)), len(text), path)
			}
		})
	})
}
