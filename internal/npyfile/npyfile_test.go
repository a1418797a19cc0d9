package npyfile

import (
	"encoding/binary"
	"fmt"
	"math"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"codeberg.org/sbinet/npyio/npy"
	"github.com/stretchr/testify/require"
)

func floats(values ...float32) []byte {
	data := []byte{}
	for _, v := range values {
		data = binary.LittleEndian.AppendUint32(data, math.Float32bits(v))
	}
	return data
}

// raw writes a file with a header as given.
func raw(t *testing.T, version byte, header string, data []byte) string {
	path := filepath.Join(t.TempDir(), "x.npy")
	content := append(npy.Magic[:], version, 0)
	if version == 1 {
		content = binary.LittleEndian.AppendUint16(content, uint16(len(header)))
	} else {
		content = binary.LittleEndian.AppendUint32(content, uint32(len(header)))
	}
	content = append(append(content, header...), data...)
	require.NoError(t, os.WriteFile(path, content, 0o600))
	return path
}

func header(typ, fortran, shape string) string {
	return fmt.Sprintf("{'descr': '%s', 'fortran_order': %s, 'shape': %s, }\n", typ, fortran, shape)
}

func TestRoundTrip(t *testing.T) {
	for _, shape := range [][]int{{}, {0}, {6}, {2, 3}, {1, 2, 3}, {3, 0, 2}} {
		n := 1
		for _, d := range shape {
			n *= d
		}
		in := Array{Type: Float32, Shape: shape, Data: floats(1, -2.5, 3e-40, 4, 5, 6)[:4*n]}
		path := filepath.Join(t.TempDir(), "a.npy")
		require.NoError(t, Write(path, in))
		out, err := Read(path)
		require.NoError(t, err)
		require.Equal(t, in.Type, out.Type)
		require.Equal(t, in.Data, out.Data)
		require.Equal(t, n, out.Count())
		require.Equal(t, ShapeString(in.Shape), ShapeString(out.Shape))

		content, err := os.ReadFile(path)
		require.NoError(t, err)
		require.Zero(t, (len(content)-len(in.Data))%64, "the data must start at a multiple of 64")
	}
}

// The library is a second opinion on what we write, and writes what we read.
func TestLibraryAgrees(t *testing.T) {
	path := filepath.Join(t.TempDir(), "a.npy")
	require.NoError(t, Write(path, Array{Type: Float32, Shape: []int{2, 2}, Data: floats(1, 2, 3, 4)}))
	file, err := os.Open(path)
	require.NoError(t, err)
	defer file.Close()
	reader, err := npy.NewReader(file)
	require.NoError(t, err)
	require.Equal(t, []int{2, 2}, reader.Header.Descr.Shape)
	var got []float32
	require.NoError(t, reader.Read(&got))
	require.Equal(t, []float32{1, 2, 3, 4}, got)

	other := filepath.Join(t.TempDir(), "b.npy")
	out, err := os.Create(other)
	require.NoError(t, err)
	require.NoError(t, npy.Write(out, []float32{5, 6, 7}))
	require.NoError(t, out.Close())
	array, err := Read(other)
	require.NoError(t, err)
	require.Equal(t, floats(5, 6, 7), array.Data)
}

func TestNumPyAgrees(t *testing.T) {
	if exec.Command("python3", "-c", "import numpy").Run() != nil {
		t.Skip("no python3 with numpy here")
	}
	folder := t.TempDir()
	ours, theirs := filepath.Join(folder, "ours.npy"), filepath.Join(folder, "theirs.npy")
	require.NoError(t, Write(ours, Array{Type: Float32, Shape: []int{2, 3}, Data: floats(1, 2, 3, 4, 5, 6)}))
	script := fmt.Sprintf("import numpy as n; a = n.load(%q); assert a.shape == (2, 3) and a.dtype == n.float32; n.save(%q, a + 1)", ours, theirs)
	text, err := exec.Command("python3", "-c", script).CombinedOutput()
	require.NoError(t, err, string(text))
	array, err := Read(theirs)
	require.NoError(t, err)
	require.Equal(t, floats(2, 3, 4, 5, 6, 7), array.Data)
}

func TestRefused(t *testing.T) {
	good := header(Float32, "False", "(2,)")
	for _, c := range []struct {
		name    string
		version byte
		header  string
		data    []byte
		want    string
	}{
		{"int64", 1, header("<i8", "False", "(1,)"), make([]byte, 8), "holds int64 ('<i8'); allowed: float32"},
		{"uint8", 1, header("|u1", "False", "(1,)"), make([]byte, 1), "holds uint8 ('|u1'); allowed"},
		{"float64", 1, header("<f8", "False", "(1,)"), make([]byte, 8), "holds float64 ('<f8'); allowed"},
		{"big-endian", 1, header(">f4", "False", "(2,)"), floats(1, 2), "holds big-endian float32 ('>f4'); allowed"},
		{"object", 1, header("|O", "False", "(1,)"), nil, "holds '|O'; allowed"},
		{"no type", 1, header("", "False", "(1,)"), nil, "allowed"},
		{"Fortran", 1, header(Float32, "True", "(1, 2)"), floats(1, 2), "is in Fortran order; allowed: float32"},
		{"truncated data", 1, good, floats(1, 2)[:7], "is truncated: 7 bytes of data, its shape (2,) of float32 ('<f4') needs 8"},
		{"no data", 2, good, nil, "is truncated: 0 bytes of data"},
		{"too long", 1, good, floats(1, 2, 3), "has bytes past its end: 12 bytes of data"},
		{"huge shape", 1, header(Float32, "False", "(9223372036854775807, 9)"), nil, "which no tensor can have"},
		{"negative shape", 1, header(Float32, "False", "(-1,)"), nil, "which no tensor can have"},
		{"version 3", 3, good, floats(1, 2), "has .npy version 3.0; allowed: 1.0, 2.0"},
		{"no line feed", 1, strings.TrimSuffix(good, "\n"), floats(1, 2), "has a damaged header"},
		{"garbage", 1, "{}\n", floats(1, 2), "has a damaged header"},
		{"odd order", 1, "{'shape': (2,), 'fortran_order': False, 'descr': '<f4'}\n", floats(1, 2), "has a damaged header"},
	} {
		t.Run(c.name, func(t *testing.T) {
			path := raw(t, c.version, c.header, c.data)
			_, err := Read(path)
			require.ErrorContains(t, err, c.want)
			require.True(t, strings.HasPrefix(err.Error(), path+": "), err)
			require.NotContains(t, err.Error(), "\n")
		})
	}
}

func TestRefusedBytes(t *testing.T) {
	folder := t.TempDir()
	write := func(name string, content []byte) string {
		path := filepath.Join(folder, name)
		require.NoError(t, os.WriteFile(path, content, 0o600))
		return path
	}
	magic := string(npy.Magic[:])
	for want, content := range map[string]string{
		"is no .npy file":                  "PK\x03\x04 something else",
		"is truncated":                     magic + "\x01\x00",
		"its header alone needs":           magic + "\x01\x00\x76\x00{'descr'",
		"has a header of 4294967307 bytes": magic + "\x02\x00\xff\xff\xff\xff{",
	} {
		_, err := Read(write("x.npy", []byte(content)))
		require.ErrorContains(t, err, want)
	}
	_, err := Read(write("empty.npy", nil))
	require.ErrorContains(t, err, "is no .npy file")
	_, err = Read(filepath.Join(folder, "absent.npy"))
	require.EqualError(t, err, filepath.Join(folder, "absent.npy")+": no such file or directory")
	_, err = Read(folder)
	require.ErrorContains(t, err, "is no regular file")
	pipe := filepath.Join(folder, "pipe.npy")
	require.NoError(t, syscall.Mkfifo(pipe, 0o600))
	_, err = Read(pipe) // without waiting for somebody to write
	require.ErrorContains(t, err, "is no regular file")
}

func TestReadSame(t *testing.T) {
	folder := t.TempDir()
	write := func(name, typ string, shape []int, bytes int) string {
		path := filepath.Join(folder, name)
		require.NoError(t, Write(path, Array{Type: typ, Shape: shape, Data: make([]byte, bytes)}))
		return path
	}
	a := write("a.npy", Float32, []int{2, 3}, 24)
	b := write("b.npy", Float32, []int{2, 3}, 24)
	c := write("c.npy", Float32, []int{3, 2}, 24)
	d := write("d.npy", Float16, []int{2, 3}, 12)
	arrays, err := ReadSame([]string{a, b})
	require.NoError(t, err)
	require.Len(t, arrays, 2)
	_, err = ReadSame([]string{a, c})
	require.EqualError(t, err, a+" has the shape (2, 3) and "+c+" (3, 2); all inputs must have one shape")
	_, err = ReadSame([]string{a, d})
	require.ErrorContains(t, err, "all inputs must have one type")
}
