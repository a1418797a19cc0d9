// Package verdicts keeps what probes found about peer access, in one file a backend, under everything whose change could
// make it wrong: driver, boot, UUIDs and bus ids. What it cannot use it treats as absent, so that a probe is made again.
package verdicts

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"gpu.example/allreduce/internal/atomicfile"
)

// format is the version of the file; another one is as good as no file.
const format = 1

// maxFile bounds what is read: 16 x 15 pairs are 100 KiB.
const maxFile = 1 << 20

// The verdicts, as the file and the command write them.
const (
	OK           = "ok"
	Slow         = "slow"         // right, but slower than through the host
	Broken       = "broken"       // bytes did not arrive, or not in order
	Unsupported  = "unsupported"  // the driver denies it
	Inconclusive = "inconclusive" // the control failed too
	Timeout      = "timeout"      // the probe had to be ended
)

// names are in the order of ar_probe_verdict.
var names = [...]string{OK, Slow, Broken, Unsupported, Inconclusive, Timeout}

// Name writes an ar_probe_verdict.
func Name(v int32) string {
	if v < 0 || int(v) >= len(names) {
		return Inconclusive
	}
	return names[v]
}

// Device is one end of a pair, whatever its ordinal today.
type Device struct {
	UUID  string `json:"uuid"`
	BusID string `json:"bus_id"`
}

// Pair is what a probe found for one ordered pair: whether From may use To's memory.
type Pair struct {
	From          Device  `json:"from"`
	To            Device  `json:"to"`
	Verdict       string  `json:"verdict"`
	Detail        string  `json:"detail,omitempty"`
	CopyGBs       float64 `json:"copy_gbs"`
	StoreGBs      float64 `json:"store_gbs"`
	StagedGBs     float64 `json:"staged_gbs"`
	LatencyMicros float64 `json:"latency_us"`
}

// Numbers says what was measured, in few words; "" where nothing was.
func (p *Pair) Numbers() string {
	if p.CopyGBs == 0 && p.StagedGBs == 0 {
		return ""
	}
	return fmt.Sprintf("copies %.1f GB/s, stores %.1f GB/s, through the host %.1f GB/s, a message %.1f us",
		p.CopyGBs, p.StoreGBs, p.StagedGBs, p.LatencyMicros)
}

// Key is what all pairs of a file share.
type Key struct {
	Driver string `json:"driver"`
	Boot   string `json:"boot_id"`
}

// File is the content of a cache file.
type File struct {
	Format int `json:"format"`
	Key
	Pairs []Pair `json:"pairs"`
}

// Path is the file of a backend ("cuda", "emulated") in a cache folder.
func Path(dir, backend string) string { return filepath.Join(dir, "peer-"+backend+".json") }

// BootID is the kernel's name for this boot, "" where it has none.
func BootID() string {
	text, _ := os.ReadFile("/proc/sys/kernel/random/boot_id")
	return strings.TrimSpace(string(text))
}

// Read gives the pairs of a file that were found under key: none where the file is missing, damaged, another version's or
// another key's, which note says in a few words.
func Read(path string, key Key) (pairs []Pair, note string) {
	file, err := os.Open(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, "there is no " + path
	} else if err != nil {
		return nil, err.Error()
	}
	defer file.Close()
	text, err := io.ReadAll(io.LimitReader(file, maxFile+1))
	if err != nil {
		return nil, err.Error()
	}
	var f File
	switch err := json.Unmarshal(text, &f); {
	case len(text) > maxFile || err != nil:
		return nil, path + " is damaged"
	case f.Format != format:
		return nil, fmt.Sprintf("%s has format %d, this version reads %d", path, f.Format, format)
	case f.Key != key:
		return nil, path + " is of another boot or driver"
	}
	for _, p := range f.Pairs {
		if !known(p.Verdict) || p.From == (Device{}) || p.To == (Device{}) {
			return nil, path + " is damaged"
		}
	}
	return f.Pairs, ""
}

func known(verdict string) bool {
	for _, n := range names {
		if n == verdict {
			return true
		}
	}
	return false
}

// Write puts pairs into a cache file, whole or not at all, beside those that the file has of other pairs under the same key.
// It makes the folder.
func Write(path string, key Key, pairs []Pair) error {
	old, _ := Read(path, key)
	f := File{Format: format, Key: key, Pairs: pairs}
	for _, p := range old {
		if Find(pairs, p.From, p.To) == nil {
			f.Pairs = append(f.Pairs, p)
		}
	}
	if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
		return err
	}
	return atomicfile.Write(path, func(w io.Writer) error {
		e := json.NewEncoder(w)
		e.SetIndent("", "  ")
		return e.Encode(f)
	})
}

// Find gives the pair, nil where there is none.
func Find(pairs []Pair, from, to Device) *Pair {
	for i := range pairs {
		if pairs[i].From == from && pairs[i].To == to {
			return &pairs[i]
		}
	}
	return nil
}

// KeyOf is today's key for a driver's version; where that is not known (no NVML), the kernel module says which it is. ok is
// false where nothing does: then nothing can be kept.
func KeyOf(driver string) (key Key, ok bool) {
	if driver == "" {
		text, _ := os.ReadFile("/proc/driver/nvidia/version")
		driver, _, _ = strings.Cut(string(text), "\n")
	}
	key = Key{Driver: driver, Boot: BootID()}
	return key, key.Driver != "" && key.Boot != ""
}

// EmulatedDriver is the driver of emulated devices.
const EmulatedDriver = "emulated"
