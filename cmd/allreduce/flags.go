package main

import (
	"encoding/json"
	"fmt"
	"io"
	"strconv"
	"strings"

	"gpu.example/allreduce"
)

// writeJSON prints one object, indented, with a line feed.
func writeJSON(w io.Writer, object any) error {
	encoder := json.NewEncoder(w)
	encoder.SetEscapeHTML(false)
	encoder.SetIndent("", "  ")
	return encoder.Encode(object)
}

// choice is a flag that takes one of a few words.
type choice struct {
	value   *string
	allowed []string
}

func newChoice(value *string, preset string, allowed ...string) choice {
	*value = preset
	return choice{value, allowed}
}

func (c choice) String() string {
	if c.value == nil {
		return ""
	}
	return *c.value
}

func (c choice) Type() string { return strings.Join(c.allowed, "|") }

func (c choice) Set(word string) error {
	for _, a := range c.allowed {
		if word == a {
			*c.value = word
			return nil
		}
	}
	return fmt.Errorf("allowed: %s", strings.Join(c.allowed, ", "))
}

// parseList splits "a,b,c" and reads each part; an empty part is refused by parse.
func parseList[T any](text string, parse func(string) (T, error)) ([]T, error) {
	var list []T
	for part := range strings.SplitSeq(text, ",") {
		value, err := parse(strings.TrimSpace(part))
		if err != nil {
			return nil, err
		}
		list = append(list, value)
	}
	return list, nil
}

// maxPayload keeps the arithmetic of all sets of buffers inside an int64; no GPU comes near it.
const maxPayload = 1 << 40

// parseSizes reads --sizes: bytes per rank, whole elements.
func parseSizes(text string, typ allreduce.Type) ([]int64, error) {
	return parseList(text, func(part string) (int64, error) {
		bytes, err := allreduce.ParseBytes(part)
		if err != nil || bytes > maxPayload {
			return 0, fmt.Errorf("--sizes: %q is no byte count; allowed: whole numbers up to 1024G, K, M or G for 1024, 1024^2, 1024^3", part)
		}
		if size := int64(typ.Size()); bytes%size != 0 {
			return 0, fmt.Errorf("--sizes: %s (%d bytes) is no multiple of the element's %d bytes (%s)", part, bytes, size, typ)
		}
		return bytes, nil
	})
}

// parseCounts reads --counts: elements per rank.
func parseCounts(text string, typ allreduce.Type) ([]int64, error) {
	return parseList(text, func(part string) (int64, error) {
		count, err := allreduce.ParseBytes(part)
		if err != nil || count > maxPayload/int64(typ.Size()) {
			return 0, fmt.Errorf("--counts: %q is no number of elements; allowed: whole numbers up to %d, K, M or G for 1024, 1024^2, 1024^3",
				part, maxPayload/int64(typ.Size()))
		}
		return count * int64(typ.Size()), nil
	})
}

// parseOrdinals reads a list of ranks or devices, each from 0 and below limit.
func parseOrdinals(flag, text string, limit int) ([]int, error) {
	return parseList(text, func(part string) (int, error) {
		n, err := strconv.ParseUint(part, 10, 31)
		if err != nil || int(n) >= limit {
			return 0, fmt.Errorf("%s: %q is not allowed; allowed: numbers from 0 to %d, separated by commas", flag, part, limit-1)
		}
		return int(n), nil
	})
}

// parseDevices reads --devices: the device of each rank; nil where none are named.
func parseDevices(text string, ranks int) ([]int, error) {
	if text == "" {
		return nil, nil
	}
	devices, err := parseOrdinals("--devices", text, 1<<16)
	if err == nil && len(devices) != ranks {
		err = fmt.Errorf("--devices names %d devices; allowed: one per rank, %d", len(devices), ranks)
	}
	return devices, err
}
