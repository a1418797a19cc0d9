package atomicfile

import (
	"errors"
	"io"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
)

func content(text string) func(io.Writer) error {
	return func(w io.Writer) error {
		_, err := io.WriteString(w, text)
		return err
	}
}

func names(t *testing.T, folder string) []string {
	entries, err := os.ReadDir(folder)
	require.NoError(t, err)
	var list []string
	for _, entry := range entries {
		list = append(list, entry.Name())
	}
	return list
}

func TestWriteReplacesWhole(t *testing.T) {
	folder := t.TempDir()
	path := filepath.Join(folder, "out")
	require.NoError(t, Write(path, content("first, long")))
	require.NoError(t, Write(path, content("second")))
	got, err := os.ReadFile(path)
	require.NoError(t, err)
	require.Equal(t, "second", string(got))
	require.Equal(t, []string{"out"}, names(t, folder))
}

func TestWriteFailureLeavesTheOldFile(t *testing.T) {
	folder := t.TempDir()
	path := filepath.Join(folder, "out")
	require.NoError(t, Write(path, content("old")))
	err := Write(path, func(w io.Writer) error {
		_, _ = io.WriteString(w, "half")
		return errors.New("no more")
	})
	require.EqualError(t, err, path+": no more")
	got, err := os.ReadFile(path)
	require.NoError(t, err)
	require.Equal(t, "old", string(got))
	require.Equal(t, []string{"out"}, names(t, folder))
}

func TestWriteFollowsLinksAndKeepsDevices(t *testing.T) {
	folder := t.TempDir()
	path, link := filepath.Join(folder, "out"), filepath.Join(folder, "link")
	require.NoError(t, Write(path, content("old")))
	require.NoError(t, os.Symlink(path, link))
	require.NoError(t, Write(link, content("new")))
	got, err := os.ReadFile(path)
	require.NoError(t, err)
	require.Equal(t, "new", string(got))
	info, err := os.Lstat(link)
	require.NoError(t, err)
	require.NotZero(t, info.Mode()&os.ModeSymlink)

	require.NoError(t, Write("/dev/null", content("gone")))
	info, err = os.Lstat("/dev/null")
	require.NoError(t, err)
	require.NotZero(t, info.Mode()&os.ModeDevice)
}

func TestCheck(t *testing.T) {
	folder := t.TempDir()
	require.NoError(t, Check(filepath.Join(folder, "out")))
	require.ErrorContains(t, Check(folder), "is a folder")
	require.ErrorContains(t, Check(filepath.Join(folder, "no", "out")), "does not exist")
}
