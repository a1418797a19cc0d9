// Package atomicfile writes a file whole or not at all: a temporary file beside it, then a rename.
package atomicfile

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
)

// Check says early what would make Write fail later: a folder that is missing, or a target that is one.
func Check(path string) error {
	if info, err := os.Stat(path); err == nil && info.IsDir() {
		return fmt.Errorf("%s: is a folder; a file's name is allowed", path)
	}
	folder := filepath.Dir(path)
	info, err := os.Stat(folder)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return fmt.Errorf("%s: the folder %s does not exist", path, folder)
	case err != nil:
		return fmt.Errorf("%s: %w", path, bare(err))
	case !info.IsDir():
		return fmt.Errorf("%s: %s is no folder", path, folder)
	}
	return nil
}

// Write lets fill write the content and puts it at path once all of it is there. A link is followed; what is no regular
// file (a terminal, a pipe, /dev/null) is written directly, since renaming over it would replace it.
func Write(path string, fill func(io.Writer) error) (err error) {
	if real, err := filepath.EvalSymlinks(path); err == nil {
		path = real
	}
	if info, err := os.Stat(path); err == nil && !info.Mode().IsRegular() {
		return writeDirectly(path, fill)
	}
	// 0666 less the umask, as for any other file; os.CreateTemp would leave it readable for its owner alone.
	name := fmt.Sprintf("%s.%d.tmp", path, os.Getpid())
	file, err := os.OpenFile(name, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o666)
	if err != nil {
		return fmt.Errorf("%s: %w", path, bare(err))
	}
	defer func() {
		if err != nil {
			_ = file.Close()
			_ = os.Remove(name)
			err = fmt.Errorf("%s: %w", path, bare(err))
		}
	}()
	buffered := bufio.NewWriterSize(file, 1<<20)
	if err := fill(buffered); err != nil {
		return err
	}
	if err := buffered.Flush(); err != nil {
		return err
	}
	if err := file.Sync(); err != nil { // else a crash after the rename could leave an empty file
		return err
	}
	if err := file.Close(); err != nil {
		return err
	}
	return os.Rename(name, path)
}

func writeDirectly(path string, fill func(io.Writer) error) error {
	file, err := os.OpenFile(path, os.O_WRONLY, 0)
	if err != nil {
		return fmt.Errorf("%s: %w", path, bare(err))
	}
	err = fill(file)
	if closing := file.Close(); err == nil {
		err = closing
	}
	if err != nil {
		return fmt.Errorf("%s: %w", path, bare(err))
	}
	return nil
}

// bare drops operation and path, which name the temporary file.
func bare(err error) error {
	var path *fs.PathError
	if errors.As(err, &path) {
		return path.Err
	}
	var link *os.LinkError
	if errors.As(err, &link) {
		return link.Err
	}
	return err
}
