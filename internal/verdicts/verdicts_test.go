package verdicts

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

func pair(from, to, verdict string) Pair {
	return Pair{From: Device{UUID: from, BusID: "0000:01:00.0"}, To: Device{UUID: to, BusID: "0000:02:00.0"}, Verdict: verdict, CopyGBs: 1}
}

func TestWriteAndRead(t *testing.T) {
	path := Path(filepath.Join(t.TempDir(), "a", "b"), "cuda")
	key := Key{Driver: "1", Boot: "x"}
	_, note := Read(path, key)
	assert.Equal(t, "there is no "+path, note)
	require.NoError(t, Write(path, key, []Pair{pair("a", "b", OK), pair("b", "a", Broken)}))
	pairs, note := Read(path, key)
	assert.Empty(t, note)
	assert.Equal(t, []Pair{pair("a", "b", OK), pair("b", "a", Broken)}, pairs)

	// Pairs that were not probed this time stay, unless the key is another one.
	require.NoError(t, Write(path, key, []Pair{pair("b", "a", OK), pair("a", "c", Slow)}))
	pairs, _ = Read(path, key)
	assert.Equal(t, []Pair{pair("b", "a", OK), pair("a", "c", Slow), pair("a", "b", OK)}, pairs)
	require.NoError(t, Write(path, Key{Driver: "2", Boot: "x"}, []Pair{pair("a", "b", OK)}))
	pairs, _ = Read(path, Key{Driver: "2", Boot: "x"})
	assert.Len(t, pairs, 1)
	entries, err := os.ReadDir(filepath.Dir(path))
	require.NoError(t, err)
	assert.Len(t, entries, 1, "nothing but the file")
}

func TestReadRefuses(t *testing.T) {
	path := filepath.Join(t.TempDir(), "f.json")
	key := Key{Driver: "1", Boot: "x"}
	good := `{"format":1,"driver":"1","boot_id":"x","pairs":[{"from":{"uuid":"a","bus_id":"1"},"to":{"uuid":"b","bus_id":"2"},"verdict":"ok"}]}`
	for text, want := range map[string]string{
		good:                       "",
		good[:len(good)-3]:         "is damaged",
		"":                         "is damaged",
		strings.Repeat(" ", 2<<20): "is damaged",
		strings.Replace(good, `"ok"`, `"fine"`, 1):              "is damaged",
		strings.Replace(good, `"uuid":"a","bus_id":"1"`, "", 1): "is damaged",
		strings.Replace(good, `"format":1`, `"format":2`, 1):    "has format 2, this version reads 1",
		strings.Replace(good, `"x"`, `"y"`, 1):                  "is of another boot or driver",
		strings.Replace(good, `"1"`, `"2"`, 1):                  "is of another boot or driver",
	} {
		require.NoError(t, os.WriteFile(path, []byte(text), 0o600))
		pairs, note := Read(path, key)
		if want == "" {
			assert.Empty(t, note)
			assert.Len(t, pairs, 1)
			continue
		}
		assert.Contains(t, note, want)
		assert.Empty(t, pairs)
	}
}

func TestName(t *testing.T) {
	assert.Equal(t, "ok", Name(0))
	assert.Equal(t, "timeout", Name(5))
	assert.Equal(t, "inconclusive", Name(6))
}
