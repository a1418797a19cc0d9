// Package npyfile reads and writes the tensors of `allreduce run --in`: NumPy's .npy files of float32 or float16 in C
// order. Every error is one line that names the file and says what is allowed.
package npyfile

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"math"
	"os"
	"slices"
	"strconv"
	"strings"

	"codeberg.org/sbinet/npyio/npy"

	"gpu.example/allreduce/internal/atomicfile"
)

// The element types that are read, as NumPy writes them.
const (
	Float32 = "<f4"
	Float16 = "<f2"
)

const allowed = "allowed: float32 ('<f4') or float16 ('<f2'), little-endian, C order"

// A header larger than this is no tensor's; NumPy itself refuses to parse more than 10000 bytes.
const maxHeader = 64 << 10

// Array is a tensor in memory: its bytes lie as in the file, little-endian, the last dimension densest.
type Array struct {
	Type  string // Float32 or Float16
	Shape []int  // empty: a single number
	Data  []byte
}

// Size is the number of bytes of one element.
func Size(typ string) int {
	if typ == Float16 {
		return 2
	}
	return 4
}

// Count is the number of elements.
func (a Array) Count() int { return len(a.Data) / Size(a.Type) }

// ShapeString writes a shape as NumPy does: (3, 4), (3,) or ().
func ShapeString(shape []int) string {
	if len(shape) == 1 {
		return fmt.Sprintf("(%d,)", shape[0])
	}
	words := make([]string, len(shape))
	for i, n := range shape {
		words[i] = strconv.Itoa(n)
	}
	return "(" + strings.Join(words, ", ") + ")"
}

// Read reads one file.
func Read(path string) (Array, error) {
	array, err := read(path)
	if err != nil {
		return Array{}, fmt.Errorf("%s: %w", path, err)
	}
	return array, nil
}

func read(path string) (Array, error) {
	// Before it is opened: opening a pipe waits for its writer.
	if info, err := os.Stat(path); err != nil {
		return Array{}, bare(err)
	} else if !info.Mode().IsRegular() {
		return Array{}, errors.New("is no regular file; a .npy file is allowed")
	}
	file, err := os.Open(path)
	if err != nil {
		return Array{}, bare(err)
	}
	defer file.Close()
	info, err := file.Stat()
	if err != nil {
		return Array{}, bare(err)
	}
	header, headerBytes, err := readHeader(file, info.Size())
	if err != nil {
		return Array{}, err
	}

	typ := strings.Trim(header.Descr.Type, "'\"")
	if typ != Float32 && typ != Float16 {
		return Array{}, fmt.Errorf("holds %s; %s", describe(typ), allowed)
	}
	if header.Descr.Fortran && len(header.Descr.Shape) > 1 { // with one dimension both orders are the same
		return Array{}, errors.New("is in Fortran order; " + allowed + " (numpy.ascontiguousarray makes it)")
	}
	bytes := int64(Size(typ))
	for _, n := range header.Descr.Shape {
		if n < 0 || (n > 0 && bytes > math.MaxInt64/int64(n)) {
			return Array{}, fmt.Errorf("has the shape %s, which no tensor can have", ShapeString(header.Descr.Shape))
		}
		bytes *= int64(n)
	}
	if have := info.Size() - headerBytes; have != bytes {
		problem := "is truncated"
		if have > bytes {
			problem = "has bytes past its end"
		}
		return Array{}, fmt.Errorf("%s: %d bytes of data, its shape %s of %s needs %d", problem, have,
			ShapeString(header.Descr.Shape), describe(typ), bytes)
	}
	// The library reads element by element and lets an early end of the file pass, so the data is read here.
	data := make([]byte, bytes)
	if _, err := io.ReadFull(file, data); err != nil {
		return Array{}, fmt.Errorf("cannot be read: %w", bare(err))
	}
	return Array{Type: typ, Shape: header.Descr.Shape, Data: data}, nil
}

// readHeader leaves the file at its data and says how many bytes came before.
func readHeader(file *os.File, size int64) (header npy.Header, bytes int64, err error) {
	// The length is checked before the library allocates what a damaged header asks for.
	var start [12]byte
	n, err := io.ReadFull(file, start[:])
	if err != nil && !errors.Is(err, io.ErrUnexpectedEOF) && !errors.Is(err, io.EOF) {
		return header, 0, fmt.Errorf("cannot be read: %w", bare(err))
	}
	if n < len(npy.Magic) || string(start[:len(npy.Magic)]) != string(npy.Magic[:]) {
		return header, 0, errors.New("is no .npy file (its first bytes are not \\x93NUMPY)")
	}
	if n < len(start) {
		return header, 0, fmt.Errorf("is truncated: its header ends after %d bytes", n)
	}
	switch major := start[6]; major {
	case 1:
		bytes = 10 + int64(binary.LittleEndian.Uint16(start[8:]))
	case 2:
		bytes = 12 + int64(binary.LittleEndian.Uint32(start[8:]))
	default:
		return header, 0, fmt.Errorf("has .npy version %d.%d; allowed: 1.0, 2.0", major, start[7])
	}
	if bytes > maxHeader {
		return header, 0, fmt.Errorf("has a header of %d bytes; allowed: up to %d", bytes, maxHeader)
	}
	if bytes > size {
		return header, 0, fmt.Errorf("is truncated: %d bytes, its header alone needs %d", size, bytes)
	}
	if _, err := file.Seek(0, io.SeekStart); err != nil {
		return header, 0, bare(err)
	}
	defer func() { // the library slices without looking where a header lacks what it expects
		if recover() != nil {
			err = errors.New("has a damaged header")
		}
	}()
	reader, err := npy.NewReader(file)
	if err != nil {
		return header, 0, fmt.Errorf("has a damaged header (%s)", printable(strings.TrimPrefix(err.Error(), "npy: ")))
	}
	_, err = file.Seek(bytes, io.SeekStart)
	return reader.Header, bytes, err
}

// describe names a dtype for people.
func describe(typ string) string {
	if typ == "" {
		return "nothing it names a type for"
	}
	kinds := map[byte]string{'f': "float", 'i': "int", 'u': "uint", 'c': "complex"}
	order, rest := typ[0], typ[1:]
	if rest != "" && kinds[rest[0]] != "" {
		if size, err := strconv.Atoi(rest[1:]); err == nil {
			name := fmt.Sprintf("%s%d ('%s')", kinds[rest[0]], 8*size, printable(typ))
			if order == '>' {
				name = "big-endian " + name
			}
			return name
		}
	}
	return "'" + printable(typ) + "'"
}

// printable is text from a file as an error may quote it: short, without control characters.
func printable(text string) string {
	quoted := fmt.Sprintf("%.100q", text)
	return quoted[1 : len(quoted)-1]
}

// ReadSame reads files that must agree in type and shape: one per rank.
func ReadSame(paths []string) ([]Array, error) {
	arrays := make([]Array, len(paths))
	for i, path := range paths {
		array, err := Read(path)
		if err != nil {
			return nil, err
		}
		first := arrays[0]
		if i > 0 && array.Type != first.Type {
			return nil, fmt.Errorf("%s holds %s and %s %s; all inputs must have one type", paths[0], describe(first.Type), path,
				describe(array.Type))
		}
		if i > 0 && !slices.Equal(array.Shape, first.Shape) {
			return nil, fmt.Errorf("%s has the shape %s and %s %s; all inputs must have one shape", paths[0],
				ShapeString(first.Shape), path, ShapeString(array.Shape))
		}
		arrays[i] = array
	}
	return arrays, nil
}

// Write writes one file, whole or not at all.
func Write(path string, array Array) error {
	return atomicfile.Write(path, func(w io.Writer) error {
		// By hand: the library writes one dimension only. Version 1.0, the data at a multiple of 64 bytes, as NumPy does.
		const fixed = 10
		header := fmt.Sprintf("{'descr': '%s', 'fortran_order': False, 'shape': %s, }", array.Type, ShapeString(array.Shape))
		header += strings.Repeat(" ", 63-(fixed+len(header))%64) + "\n"
		if len(header) > math.MaxUint16 {
			return fmt.Errorf("a shape of %d dimensions does not fit the format", len(array.Shape))
		}
		start := append(npy.Magic[:], 1, 0)
		start = binary.LittleEndian.AppendUint16(start, uint16(len(header)))
		for _, part := range [][]byte{start, []byte(header), array.Data} {
			if _, err := w.Write(part); err != nil {
				return err
			}
		}
		return nil
	})
}

// bare drops operation and path, since every error here begins with the file.
func bare(err error) error {
	var path *fs.PathError
	if errors.As(err, &path) {
		return path.Err
	}
	return err
}
