// Package testfuzz holds what the fuzz tests of all parsers ask for: errors that are one short line, and no allocation out
// of proportion to the input.
package testfuzz

import (
	"runtime"
	"strings"
	"testing"
)

// Limits on what a parser may do with n bytes of input.
const (
	spareBytes   = 8 << 20 // regardless of the input: tables, a command's flags
	bytesPerByte = 1 << 10
	maxError     = 2 << 10 // of an error, beside the input
)

// Bounded runs a parser on so many bytes of input and fails where it allocates more than a small multiple of them.
func Bounded(t *testing.T, input int, parse func()) {
	t.Helper()
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	parse()
	runtime.ReadMemStats(&after)
	if got, allowed := after.TotalAlloc-before.TotalAlloc, uint64(spareBytes+bytesPerByte*input); got > allowed {
		t.Fatalf("%d bytes were allocated for %d bytes of input; allowed: %d", got, input, allowed)
	}
}

// OneLine asserts that an error is one line without control characters, not much longer than the input allows, and that
// it holds every part.
func OneLine(t *testing.T, err error, input int, parts ...string) {
	t.Helper()
	text := err.Error()
	if text == "" || len(text) > maxError+8*input {
		t.Fatalf("an error of %d bytes for %d bytes of input", len(text), input)
	}
	if at := strings.IndexFunc(text, func(r rune) bool { return r < ' ' || r == 0x7f }); at >= 0 {
		t.Fatalf("an error with a control character at byte %d: %q", at, text)
	}
	for _, part := range parts {
		if !strings.Contains(text, part) {
			t.Fatalf("an error without %q: %q", part, text)
		}
	}
}
