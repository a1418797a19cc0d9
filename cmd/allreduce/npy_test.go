package main

import (
	"bytes"
	"encoding/binary"
	"math"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"gpu.example/allreduce/internal/npyfile"
	"gpu.example/allreduce/internal/reference"
)

// npyFolder is a folder with inputs.
type npyFolder struct {
	t    *testing.T
	path string
}

func newNpyFolder(t *testing.T) npyFolder { return npyFolder{t, t.TempDir()} }

func (f npyFolder) at(name string) string { return filepath.Join(f.path, name) }

func (f npyFolder) write(name, typ string, shape []int, data []byte) string {
	f.t.Helper()
	require.NoError(f.t, npyfile.Write(f.at(name), npyfile.Array{Type: typ, Shape: shape, Data: data}))
	return f.at(name)
}

// requireOnly asserts that a command wrote nothing beside the inputs.
func (f npyFolder) requireOnly(names ...string) {
	f.t.Helper()
	entries, err := os.ReadDir(f.path)
	require.NoError(f.t, err)
	var got []string
	for _, entry := range entries {
		got = append(got, entry.Name())
	}
	require.ElementsMatch(f.t, names, got)
}

func floats(values ...float32) []byte {
	var data []byte
	for _, v := range values {
		data = binary.LittleEndian.AppendUint32(data, math.Float32bits(v))
	}
	return data
}

func TestNpySum(t *testing.T) {
	f := newNpyFolder(t)
	a := f.write("a.npy", npyfile.Float32, []int{2, 3}, floats(1, 2, 3, 4, 5, 6))
	b := f.write("b.npy", npyfile.Float32, []int{2, 3}, floats(10, 20, 30, 40, 50, float32(math.Inf(1))))
	o := invoke(t, nil, "run", "--backend", "emulated", "--in", a, "--in", b, "--out", f.at("sum.npy"))
	require.Equal(t, exitGood, o.code, o.err)
	require.Contains(t, o.out, "written to "+f.at("sum.npy"))
	sum, err := npyfile.Read(f.at("sum.npy"))
	require.NoError(t, err)
	require.Equal(t, []int{2, 3}, sum.Shape)
	require.Equal(t, floats(11, 22, 33, 44, 55, float32(math.Inf(1))), sum.Data)
	f.requireOnly("a.npy", "b.npy", "sum.npy")
}

// The result has the route's precision: a large one travels as BF16.
func TestNpyLarge(t *testing.T) {
	const count = 200_000
	f := newNpyFolder(t)
	inputs := make([][]byte, 2)
	for rank := range inputs {
		inputs[rank] = make([]byte, 4*count)
		reference.Fill(inputs[rank], reference.Normal, reference.F32, 5, rank)
	}
	a := f.write("a.npy", npyfile.Float32, []int{count}, inputs[0])
	b := f.write("b.npy", npyfile.Float32, []int{count}, inputs[1])
	for _, mode := range []string{"--graph", "--in-place"} {
		report := runJSON(t, exitGood, nil, mode, "--iters", "3", "--in", a, "--in", b, "--out", f.at("sum.npy"))
		requireGood(t, report)
		require.Equal(t, "bf16", report.Results[0].Wire)
		want, err := reference.Reduction{Type: reference.F32, Wire: reference.BF16, Inputs: inputs}.Result()
		require.NoError(t, err)
		sum, err := npyfile.Read(f.at("sum.npy"))
		require.NoError(t, err)
		require.Equal(t, want, sum.Data)
	}
}

func TestNpyHalfScalarEmpty(t *testing.T) {
	f := newNpyFolder(t)
	half := f.write("half.npy", npyfile.Float16, []int{2}, []byte{0x00, 0x3C, 0x00, 0xC0}) // 1, -2
	scalar := f.write("scalar.npy", npyfile.Float32, nil, floats(1.5))
	empty := f.write("empty.npy", npyfile.Float32, []int{0, 4}, nil)
	for in, want := range map[string][]byte{half: {0x00, 0x40, 0x00, 0xC4}, scalar: floats(3), empty: {}} {
		o := invoke(t, nil, "run", "--backend", "emulated", "--in", in, "--in", in, "--out", f.at("sum.npy"))
		require.Equal(t, exitGood, o.code, o.err)
		sum, err := npyfile.Read(f.at("sum.npy"))
		require.NoError(t, err)
		require.Equal(t, want, sum.Data)
	}
}

func TestNpyRefused(t *testing.T) {
	f := newNpyFolder(t)
	good := f.write("good.npy", npyfile.Float32, []int{2, 3}, floats(1, 2, 3, 4, 5, 6))
	turned := f.write("turned.npy", npyfile.Float32, []int{3, 2}, floats(1, 2, 3, 4, 5, 6))
	ints := f.write("ints.npy", "<i8", []int{1}, make([]byte, 8))
	big := f.write("big.npy", ">f4", []int{1}, make([]byte, 4))
	cut := f.write("cut.npy", npyfile.Float32, []int{4}, floats(1, 2, 3))
	fortran := f.at("fortran.npy")
	text, err := os.ReadFile(good)
	require.NoError(t, err)
	text = bytes.Replace(text, []byte("False, 'shape': (2, 3), }"), []byte("True, 'shape': (2, 3), } "), 1)
	require.NoError(t, os.WriteFile(fortran, text, 0o600))
	inputs := []string{"good.npy", "turned.npy", "ints.npy", "big.npy", "cut.npy", "fortran.npy"}

	for _, c := range []struct {
		name string
		args []string
		want []string
	}{
		{"truncated", []string{"--in", good, "--in", cut}, []string{cut, "is truncated"}},
		{"shapes", []string{"--in", good, "--in", turned}, []string{good, turned, "(2, 3)", "(3, 2)", "one shape"}},
		{"integers", []string{"--in", ints, "--in", ints}, []string{ints, "int64", "allowed: float32"}},
		{"big-endian", []string{"--in", big, "--in", big}, []string{big, "big-endian", "allowed: float32"}},
		{"Fortran order", []string{"--in", fortran, "--in", fortran}, []string{fortran, "Fortran order", "allowed"}},
		{"missing", []string{"--in", good, "--in", f.at("none.npy")}, []string{f.at("none.npy"), "no such file"}},
		{"three for two ranks", []string{"--ranks", "2", "--in", good, "--in", good, "--in", good}, []string{"--ranks 2", "one --in per rank"}},
		{"other type", []string{"--type", "f16", "--in", good, "--in", good}, []string{good, "--type f16"}},
		{"sizes", []string{"--sizes", "1K", "--in", good, "--in", good}, []string{"--sizes cannot be used with --in"}},
		{"out is a folder", []string{"--in", good, "--in", good, "--out", f.path}, []string{f.path, "is a folder"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			args := append([]string{"run", "--backend", "emulated", "--out", f.at("sum.npy")}, c.args...)
			requireRefused(t, invoke(t, nil, args...), c.want...)
			f.requireOnly(inputs...)
		})
	}
}

// A wrong result is not written over a good one.
func TestNpyFindingWritesNothing(t *testing.T) {
	f := newNpyFolder(t)
	a := f.write("a.npy", npyfile.Float32, []int{1}, floats(1))
	o := invoke(t, []string{"GGML_CUDA_AR_NOOP=1"}, "run", "--backend", "emulated", "--in", a, "--in", a, "--out", f.at("sum.npy"))
	require.Equal(t, exitFinding, o.code, o.err)
	require.Contains(t, o.out, "was not written")
	f.requireOnly("a.npy")
}
