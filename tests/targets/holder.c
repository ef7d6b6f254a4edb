/* A module in C that keeps objects where the garbage collector does not look: in an array of its own. */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

static PyObject **kept;
static size_t count;

static PyObject *keep(PyObject *self, PyObject *object)
{
    PyObject **more = realloc(kept, (count + 1) * sizeof *kept);
    (void)self;
    if (more == NULL)
        return PyErr_NoMemory();
    kept = more;
    Py_INCREF(object);
    kept[count++] = object;
    Py_RETURN_NONE;
}

static PyObject *drop(PyObject *self, PyObject *nothing)
{
    (void)self;
    (void)nothing;
    while (count > 0)
        Py_DECREF(kept[--count]);
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"keep", keep, METH_O, "Keeps an object."},
    {"drop", drop, METH_NOARGS, "Lets all objects go."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT, "holder", NULL, -1, methods, NULL, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit_holder(void)
{
    return PyModule_Create(&module);
}
