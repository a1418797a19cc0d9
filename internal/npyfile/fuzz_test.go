package npyfile

import (
	"bytes"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"gpu.example/allreduce/internal/testfuzz"
)

// Any file is refused in one line that begins with its name, or is a tensor that is written and read back as itself.
func FuzzRead(f *testing.F) {
	add := func(a Array) {
		path := filepath.Join(f.TempDir(), "seed.npy")
		if err := Write(path, a); err != nil {
			f.Fatal(err)
		}
		text, err := os.ReadFile(path)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(text)
		f.Add(text[:len(text)/2])
		f.Add(bytes.Replace(text, []byte("False"), []byte("True "), 1))
		f.Add(bytes.Replace(text, []byte("'shape': ("), []byte("'shape': (9999999999, "), 1))
		f.Add(bytes.Replace(text, []byte("<f"), []byte(">f"), 1))
		f.Add(bytes.Replace(text, []byte{1, 0}, []byte{2, 0}, 1))
	}
	add(Array{Type: Float32, Shape: []int{2, 3}, Data: make([]byte, 24)})
	add(Array{Type: Float16, Shape: []int{}, Data: make([]byte, 2)})
	add(Array{Type: Float16, Shape: []int{0}, Data: nil})
	f.Add([]byte("\x93NUMPY\x02\x00\xff\xff\xff\xff"))
	f.Add([]byte("\x93NUMPY\x01\x00\x10\x00{'shape': (-1,)}"))
	f.Add([]byte("\x93NUMPY\x01\x00\x40\x00{'descr': '<f4', 'fortran_order': \x00\n, 'shape': (2,), }           \n"))
	f.Add([]byte("\x93NUMPY\x01\x00\x40\x00{'descr': '<f\n\x00', 'fortran_order': False, 'shape': (2,), }        \n"))
	folder := f.TempDir()
	f.Fuzz(func(t *testing.T, content []byte) {
		path := filepath.Join(folder, "x.npy")
		if err := os.WriteFile(path, content, 0o600); err != nil {
			t.Fatal(err)
		}
		var array Array
		var err error
		testfuzz.Bounded(t, len(content), func() { array, err = Read(path) })
		if err != nil {
			testfuzz.OneLine(t, err, len(content), path+": ")
			return
		}
		elements := 1
		for _, n := range array.Shape {
			elements *= n
		}
		if array.Count() != elements || len(array.Data) != elements*Size(array.Type) || !bytes.HasSuffix(content, array.Data) {
			t.Fatalf("%d bytes of %s for the shape %v", len(array.Data), array.Type, array.Shape)
		}
		if err := Write(path, array); err != nil {
			if strings.Contains(err.Error(), "does not fit the format") { // version 2 has room for more dimensions
				return
			}
			t.Fatal(err)
		}
		back, err := Read(path)
		if err != nil || back.Type != array.Type || !slices.Equal(back.Shape, array.Shape) || !bytes.Equal(back.Data, array.Data) {
			t.Fatalf("written and read back: %s %v and %d bytes (%v), not %s %v and %d", back.Type, back.Shape, len(back.Data), err,
				array.Type, array.Shape, len(array.Data))
		}
	})
}
