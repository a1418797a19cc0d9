package device

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"
)

// maxMachineFile bounds what LoadMachine reads: a machine of 16 devices takes about 5 KiB.
const maxMachineFile = 1 << 20

// LoadMachine reads the JSON file that describes an emulated machine. It is strict: an unknown field, a value of the
// wrong kind or out of range, and anything behind the object are ErrArgument, with the file and the field in the message. A
// file that cannot be read is ErrArgument too, and unwraps to the operating system's error as well.
//
//	{"devices": [{}, {"h2d_gbs": 12, "d2h_gbs": 12, "duplex_gbs": 11}], "peer": [[false, true], [true, false]]}
func LoadMachine(path string) (Machine, error) {
	f, err := os.Open(path)
	if err != nil {
		return Machine{}, fileError(err)
	}
	defer f.Close()
	text, err := io.ReadAll(io.LimitReader(f, maxMachineFile+1))
	if err != nil {
		return Machine{}, fileError(err)
	}
	if len(text) > maxMachineFile {
		return Machine{}, machineError("%s: larger than %d bytes", path, maxMachineFile)
	}
	m, err := ParseMachine(text)
	var e *Error
	if errors.As(err, &e) {
		e.Message = path + ": " + e.Message
	}
	return m, err
}

// fileError's err is an *fs.PathError, which names the file.
func fileError(err error) error {
	e := machineError("the file of the emulated machine cannot be read: %v", err)
	e.Err = errors.Join(ErrArgument, err)
	return e
}

// ParseMachine reads a machine from the text of such a file.
func ParseMachine(text []byte) (Machine, error) {
	decoder := json.NewDecoder(bytes.NewReader(text))
	decoder.DisallowUnknownFields()
	var m Machine
	if err := decoder.Decode(&m); err != nil {
		return Machine{}, describe(text, err)
	}
	if _, err := decoder.Token(); err != io.EOF {
		return Machine{}, machineError("%s: something follows the object", position(text, decoder.InputOffset()))
	}
	if err := m.Validate(); err != nil {
		return Machine{}, err
	}
	return m, nil
}

// describe turns encoding/json's error into one that names the place and the field.
func describe(text []byte, err error) *Error {
	var (
		syntax *json.SyntaxError
		kind   *json.UnmarshalTypeError
		own    *Error
	)
	switch {
	case errors.As(err, &own):
		return own
	case errors.As(err, &syntax):
		return machineError("%s: %s", position(text, syntax.Offset-1), syntax.Error())
	case errors.As(err, &kind):
		field := kind.Field
		if field == "" {
			field = "the machine"
		}
		return machineError("%s: %s is a %s; allowed: %s", position(text, kind.Offset), field, kind.Value, jsonKind(kind.Type.String()))
	case errors.Is(err, io.EOF), errors.Is(err, io.ErrUnexpectedEOF):
		return machineError("%s: the text ends inside the object", position(text, int64(len(text))))
	}
	return machineError("%s", strings.TrimPrefix(err.Error(), "json: ")) // unknown field "..."
}

// jsonKind names a Go type as the writer of a JSON file knows it.
func jsonKind(goType string) string {
	switch {
	case strings.HasPrefix(goType, "[]"):
		return "a list"
	case strings.HasPrefix(goType, "float"):
		return "a number"
	case strings.HasPrefix(goType, "int"), strings.HasPrefix(goType, "uint"):
		return "a whole number in range"
	case goType == "bool":
		return "true or false"
	case goType == "device.Drive":
		return strings.Join(driveNames, ", ")
	case goType == "device.Schedule":
		return strings.Join(scheduleNames, ", ")
	}
	return "an object"
}

// position is line and column of an offset, from 1.
func position(text []byte, offset int64) string {
	offset = max(0, min(offset, int64(len(text))))
	before := text[:offset]
	line := bytes.Count(before, []byte{'\n'}) + 1
	column := len(before) - bytes.LastIndexByte(before, '\n')
	return fmt.Sprintf("line %d, column %d", line, column)
}
